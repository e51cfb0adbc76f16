"""Loss of quality by compressed tables: data, models, methods of compression, training.

`data` loads or draws labelled samples, `methods` compresses the large tables of a model in one of
several ways, `training` trains a model and returns how well it predicts.
"""

DATA = {
    "planted": "clicks whose probabilities are known",
    "movielens": "ratings of MovieLens-100k",
    "flights": "departures from New York in 2013",
    "criteo": "a file of Criteo's layout",
    "interactions": "a file of user, item and time",
}
"""Data sets by name, with a description."""
