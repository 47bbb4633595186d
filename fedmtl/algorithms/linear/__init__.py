"""Linear models, shared by the methods that are made for them: data, losses, optima and exact local fits."""
