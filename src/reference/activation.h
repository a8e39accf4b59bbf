// The activations between the two GEMMs, in double, from the formulas of fusedmoe/weights.h.
#pragma once

#include "fusedmoe/weights.h"

namespace fusedmoe::reference {

double sigmoid(double x);

/// `up` is ignored by the activations without a gate. NaN gives NaN.
double activate(const ResolvedActivation& activation, double gate, double up);

}  // namespace fusedmoe::reference
