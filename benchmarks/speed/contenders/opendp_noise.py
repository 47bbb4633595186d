"""OpenDP's discrete Gaussian noise on vectors of 64-bit integers: milliseconds a release, one line of JSON."""

import json
import sys
import time

import opendp.prelude as dp

dp.enable_features("contrib")
size, scale, repetitions = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
space = dp.vector_domain(dp.atom_domain(T="i64"), size=size), dp.l2_distance(T="i64")
release = space >> dp.m.then_gaussian(scale)
zeros = [0] * size
spent = []
for _ in range(repetitions):
    begun = time.process_time()
    release(zeros)
    spent.append(time.process_time() - begun)
print(json.dumps({"seconds": spent}))
