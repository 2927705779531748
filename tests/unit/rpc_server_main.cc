// A device whose memory the tests can't touch: ggml's RPC server over the CPU, as its own process.
//   hcache_rpc_test_server HOST:PORT THREADS
#include <ggml-backend.h>
#include <ggml-rpc.h>

#include <csignal>
#include <cstdlib>

int main(int argc, char** argv) {
  if (argc != 3) return EXIT_FAILURE;
  std::signal(SIGPIPE, SIG_IGN);  // a client that goes away must not end the server
  ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (device == nullptr) return EXIT_FAILURE;
  ggml_backend_rpc_start_server(argv[1], nullptr, std::strtoul(argv[2], nullptr, 10), 1, &device);
  return EXIT_FAILURE;  // it serves until it is killed
}
