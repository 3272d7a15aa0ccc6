// Replaces a header that the wheel lacks. In builds with a profiler, these macros mark ranges for it.
#pragma once
#define OF_PROFILER_RANGE_PUSH(name)
#define OF_PROFILER_RANGE_POP()
#define OF_PROFILER_RANGE_GUARD(name)
