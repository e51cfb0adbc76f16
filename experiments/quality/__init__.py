"""Loss of quality by compressed tables: data, models, methods of compression, training.

`data` loads or draws labelled samples, `methods` compresses the large tables of a model in one of
several ways, `training` trains a model and scores its predictions.
"""

MIN_SAMPLES = 10  # of a data set: with fewer, the validation or test samples may be none
DATA = ("planted", "movielens", "flights", "criteo", "interactions")
"""Names of the data sets; each is described by the function of this name in `data`."""
