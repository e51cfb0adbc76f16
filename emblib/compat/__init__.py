"""Other libraries' names and signatures over emblib's modules: change the import, keep the code.

`emblib.compat.fbgemm` is FBGEMM's table batched embeddings, `emblib.compat.dynamicemb` NVIDIA's
DynamicEmb, `emblib.compat.fbtt` FBTT-Embedding. Importing this package imports none of them, and
none of the other libraries is needed.
"""
