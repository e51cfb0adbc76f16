"""Other libraries' names and signatures over emblib's modules: change the import, keep the code.

`emblib.compat.fbgemm` has the names of FBGEMM's table-batched embeddings, `emblib.compat.torchrec`
those of TorchRec, `emblib.compat.dynamicemb` those of NVIDIA's DynamicEmb and `emblib.compat.fbtt`
those of FBTT-Embedding. Importing this package imports none of the four modules, and none of the
other libraries is needed.
"""
