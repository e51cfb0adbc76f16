"""Other libraries' names and signatures over emblib's modules: change the import, keep the code.

`emblib.compat.fbgemm` has the names of FBGEMM's table-batched embeddings, `emblib.compat.torchrec`
the names of TorchRec, `emblib.compat.dynamicemb` of NVIDIA's DynamicEmb, and `emblib.compat.fbtt`
of FBTT-Embedding. Importing this package imports none of the four modules, and none needs the
library that it stands for.
"""
