// The files of the pretend GPU that include torch's headers, as one translation unit: the compiler
// takes ten seconds to read these headers, once instead of four times.
#include "aten.cpp"
#include "collectives.cpp"
#include "sparse.cpp"
#include "torch_device.cpp"
