// What the thread sanitizer must not report, linked into every test program that runs UCX. UCX is not built with it: it
// sees UCX's system calls, memcpys and some of its locks, and two transports in one process talk through sockets, an
// order that it can't see. _dl_call_fini: UCX's libraries unlock while they are unloaded, without a frame of their own.
// Such programs also need UCX_MEM_EVENTS=n under it (tests/CMakeLists.txt): UCX's memory hooks call into the sanitizer
// on threads that it has said goodbye to, which crashes.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "called_from_lib:libucp.so\n"
         "called_from_lib:libuct.so\n"
         "called_from_lib:libucs.so\n"
         "mutex:_dl_call_fini\n";
}
