// The files of the pretend GPU without torch's headers, as one translation unit.
#include "accesses.cpp"
#include "faults.cpp"
#include "memory.cpp"
#include "pinned.cpp"
#include "probes.cpp"
#include "races.cpp"
#include "runtime.cpp"
#include "streams.cpp"
