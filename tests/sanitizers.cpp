// Tells the thread sanitizer which reports to suppress. This file is linked into every test program, and into the
// product's program in builds with a sanitizer. Other builds don't use it.
extern "C" const char* __tsan_default_suppressions();

// UCX and libzmq are not built with the thread sanitizer. So the sanitizer sees their system calls, their memcpys and
// some of their locks, but not that their queues and sockets order the data that passes through them. UCX's libraries
// unlock mutexes while they are unloaded and before a fork, without a stack frame of their own. Only libzmq writes
// strings into streams on a thread of its own. Some tests read memory that a worker has written, after its socket says
// so, or damage a pool on purpose while the pool is in use. Programs that run UCX also need UCX_MEM_EVENTS=n
// (CMakeLists.txt): UCX's memory hooks call into the sanitizer on threads that the sanitizer has already released,
// which crashes.
extern "C" const char* __tsan_default_suppressions() {
  return "called_from_lib:libucp.so\n"
         "called_from_lib:libuct.so\n"
         "called_from_lib:libucs.so\n"
         "called_from_lib:libzmq.so\n"
         "race:libzmq.so\n"
         "race:streambuf*xsputn\n"
         "race:kvferry::LoopbackCore::copy_locked\n"
         "race:kvferry::ShapedNode::damage\n"
         "mutex:_dl_call_fini\n"
         "mutex:__run_prefork_handlers\n";
}
