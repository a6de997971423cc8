// What the thread sanitizer must not report. UCX and libzmq are not built with it: it sees their system calls, memcpys
// and some of their locks, but not that their queues and sockets order what passes through them. _dl_call_fini: UCX's
// libraries unlock while they are unloaded, without a frame of their own. Programs that run UCX also need
// UCX_MEM_EVENTS=n (CMakeLists.txt): its memory hooks call into the sanitizer on threads that it has said goodbye to,
// which crashes. Linked into every test program; nothing reads it without the sanitizer.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "called_from_lib:libucp.so\n"
         "called_from_lib:libuct.so\n"
         "called_from_lib:libucs.so\n"
         "called_from_lib:libzmq.so\n"
         "mutex:_dl_call_fini\n";
}
