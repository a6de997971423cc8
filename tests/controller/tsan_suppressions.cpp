// libzmq is not built with the thread sanitizer, which therefore can't see that its queues order what passes through
// them. Linked into each test that opens sockets; nothing reads it elsewhere.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() { return "called_from_lib:libzmq.so\n"; }
