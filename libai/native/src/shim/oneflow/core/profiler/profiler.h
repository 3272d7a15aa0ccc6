// As autograd/autograd_captured_tensor.h. The macros mark ranges for a profiler, in builds for it only.
#pragma once
#define OF_PROFILER_RANGE_PUSH(name)
#define OF_PROFILER_RANGE_POP()
#define OF_PROFILER_RANGE_GUARD(name)
