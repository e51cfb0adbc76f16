"""What a model loses when its tables are made smaller: data, models, methods, training.

`data` loads or draws samples with a label, `methods` makes the large tables of a model small in one
of several ways, `training` fits a model and says how well it predicts.
"""

PLAIN = "plain"

LABELS = {
    "plain": "plain",
    "bf16": "16-bit rows",
    "narrow": "narrower",
    "projected": "narrower, projected",
    "hashed": "hashed",
    "modulo": "remainder",
    "hashed_twice": "hashed twice",
    "qr_sum": "quotient + remainder",
    "qr_product": "quotient × remainder",
    "tt_permuted": "tensor train",
    "tt_as_given": "tensor train, ids as given",
    "tt_from_plain": "tensor train from plain",
    "tt_hot": "hot rows + tensor train",
    "tt_cached": "cached tensor train",
    "tt_cached_drop": "cached tensor train, dropping",
    "hashed_hot": "hot rows + hashed",
    "evicting": "dynamic, evicting",
    "planned": "planned per table",
    "robe": "ROBE",
    "dhe": "DHE",
}
"""Name and label of each method, in the order in which they are tried."""

DATA = {
    "planted": "clicks whose probabilities are known",
    "movielens": "ratings of MovieLens-100k",
    "flights": "departures from New York in 2013",
    "criteo": "a file of Criteo's layout",
    "interactions": "a file of user, item and time",
}
"""What models can be trained on."""
