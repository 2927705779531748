// Whether our engine runs a model, wherever its weights are to go.
#pragma once

#include <string>

#include "base/env.h"
#include "base/status.h"
#include "model/device.h"

namespace hcache::model {

// What Model::load() says of the file itself: kUnimplemented for an architecture, a key or a tensor
// that it has nothing for, kDataLoss, kNotFound. No weight is read.
// Threading: any thread.
[[nodiscard]] Status check_model(const std::string& path, Device& device, Env& env);

}  // namespace hcache::model
