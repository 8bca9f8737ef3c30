// LOCO_MISTAKE(name) is false: it marks a place where a mistake would be easy to make. A test compiles the sources so
// that it is true where a run asks for that mistake, and expects the run to fail.
#pragma once

#ifndef LOCO_MISTAKE
#define LOCO_MISTAKE(name) false
#endif
