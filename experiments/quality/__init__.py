"""What a model loses when its tables are made smaller: data, models, methods, training.

`data` loads or draws samples with a label, `methods` makes the large tables of a model small in one
of several ways, `training` fits a model and says how well it predicts.
"""

DATA = {
    "planted": "clicks whose probabilities are known",
    "movielens": "ratings of MovieLens-100k",
    "flights": "departures from New York in 2013",
    "criteo": "a file of Criteo's layout",
    "interactions": "a file of user, item and time",
}
"""What models can be trained on."""
