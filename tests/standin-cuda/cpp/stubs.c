// Every other function of the driver: not supported here. Weak, so that those of the stand-in take their place.
#define S(name) __attribute__((weak, visibility("default"))) int name(void) { return 801; }
#include "stubs.inc"
