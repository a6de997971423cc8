// What the thread sanitizer must not report. Linked into every test program, and into the product's program where a
// sanitizer is on; nothing reads it without.
extern "C" const char* __tsan_default_suppressions();

// UCX and libzmq are not built with the thread sanitizer: it sees their system calls, memcpys and some of their locks,
// but not that their queues and sockets order what passes through them. UCX's libraries unlock while they are unloaded
// and before a fork, without a frame of their own; only libzmq writes strings into streams on a thread of its own.
// Some tests read memory that a worker has written once its socket says so, or damage a pool on purpose while it runs.
// Programs that run UCX also need UCX_MEM_EVENTS=n (CMakeLists.txt): its memory hooks call into the sanitizer on
// threads that it has said goodbye to, which crashes.
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
