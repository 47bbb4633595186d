"""Readers, one file a format.

Every module of this folder is imported with the package, so that its readers register themselves by
name (:func:`fedmtl.data.loaders.reader`).
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f".{_module.name}", __name__)
