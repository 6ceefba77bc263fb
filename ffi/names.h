// The words of attributes and of the test harness, as values.
#pragma once

#include <string>
#include <string_view>

#include "kernels/matmul.h"
#include "kernels/reduce.h"
#include "mechanism/mechanism.h"
#include "runtime/check.h"

namespace pk {

inline Mechanism mechanism_from(std::string_view name) {
  if (name == "register") return Mechanism::kRegister;
  if (name == "tma") return Mechanism::kTma;
  if (name == "copy_engine") return Mechanism::kCopyEngine;
  throw Error("mechanism must be \"register\", \"tma\" or \"copy_engine\", not \"" +
              std::string(name) + "\"");
}

inline Protocol protocol_from(std::string_view name) {
  if (name == "simple") return Protocol::kSimple;
  if (name == "ll") return Protocol::kLowLatency;
  throw Error("protocol must be \"simple\" or \"ll\", not \"" + std::string(name) + "\"");
}

inline Reduction reduction_from(std::string_view name) {
  if (name == "sum") return Reduction::kSum;
  if (name == "max") return Reduction::kMax;
  if (name == "min") return Reduction::kMin;
  throw Error("reduction must be \"sum\", \"max\" or \"min\", not \"" + std::string(name) + "\"");
}

inline Algorithm algorithm_from(std::string_view algorithm) {
  if (algorithm == "one_shot") return Algorithm::kOneShot;
  if (algorithm == "two_shot") return Algorithm::kTwoShot;
  throw Error("algorithm must be \"one_shot\" or \"two_shot\", not \"" + std::string(algorithm) +
              "\"");
}

inline MatmulTile matmul_tile_from(std::string_view name) {
  if (name == "128x256") return MatmulTile::k128x256;
  if (name == "128x128") return MatmulTile::k128x128;
  if (name == "64x256") return MatmulTile::k64x256;
  if (name == "64x128") return MatmulTile::k64x128;
  if (name == "64x64") return MatmulTile::k64x64;
  throw Error("tile must be \"128x256\", \"128x128\", \"64x256\", \"64x128\" or \"64x64\", not \"" +
              std::string(name) + "\"");
}

inline MatmulActivation matmul_activation_from(std::string_view name) {
  if (name == "none") return MatmulActivation::kNone;
  if (name == "relu") return MatmulActivation::kRelu;
  if (name == "gelu") return MatmulActivation::kGelu;
  if (name == "silu") return MatmulActivation::kSilu;
  throw Error("activation must be \"none\", \"relu\", \"gelu\" or \"silu\", not \"" +
              std::string(name) + "\"");
}

}  // namespace pk
