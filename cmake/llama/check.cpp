// Linked with all of hcache-common, so that a function missing from the subset shows at once.
#include "llama.h"

int main() { return llama_max_devices() > 0 ? 0 : 1; }
