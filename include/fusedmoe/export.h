// What the shared library exports; everything else is hidden.
#pragma once

#define FUSEDMOE_API __attribute__((visibility("default")))
