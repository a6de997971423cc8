// What the sanitizers must not report, linked into every test program that runs UCX. UCX is not built with them: they
// see its system calls and memcpys but not its locks, and two transports in one process talk through sockets, an order
// that the thread sanitizer can't see.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "called_from_lib:libucp.so\n"
         "called_from_lib:libuct.so\n"
         "called_from_lib:libucs.so\n"
         "called_from_lib:libucm.so\n";
}
