// What the handlers of attention and of its derivative share: their sizes, from buffers and
// attributes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "ffi/attributes.h"
#include "ffi/handler.h"
#include "kernels/attention.h"
#include "runtime/check.h"
#include "schedule/attention_walk.h"
#include "xla/ffi/api/ffi.h"

namespace pk {

inline void require_shape(const char* name, const xla::ffi::AnyBuffer& buffer,
                          xla::ffi::DataType type, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  if (buffer.element_type() == type && dims.size() == shape.size() &&
      std::equal(dims.begin(), dims.end(), shape.begin()))
    return;
  std::string found, needed;
  for (int64_t size : dims) found += " " + std::to_string(size);
  for (int64_t size : shape) needed += " " + std::to_string(size);
  throw Error(std::string(name) + " has shape" + found + " where" + needed +
              " is needed, or another type");
}

// Of query, key and value, the first three operands; and of the places, from operand `next` on.
inline AttentionShape attention_shape(const xla::ffi::RemainingArgs& operands, size_t next,
                                      const xla::ffi::Dictionary& attributes) {
  using Type = xla::ffi::DataType;
  const auto q = operand(operands, 0), k = operand(operands, 1), v = operand(operands, 2);
  const Type type = q.element_type();
  if (type != Type::BF16 && type != Type::F16) throw Error("operands must be bfloat16 or float16");
  for (const auto& x : {q, k, v}) {
    if (x.dimensions().size() != 4) throw Error("query, key and value must have four dimensions");
  }
  AttentionShape in{};
  in.batch = q.dimensions()[0];
  in.num_queries = q.dimensions()[1];
  in.num_keys = k.dimensions()[1];
  in.num_heads = q.dimensions()[2];
  in.num_kv_heads = k.dimensions()[2];
  in.width = q.dimensions()[3];
  in.value_width = v.dimensions()[3];
  in.bfloat16 = type == Type::BF16;
  require_shape("key", k, type, {in.batch, in.num_keys, in.num_kv_heads, in.width});
  require_shape("value", v, type, {in.batch, in.num_keys, in.num_kv_heads, in.value_width});
  in.scale = attribute<float>(attributes, "scale");
  in.soft_cap = attribute<float>(attributes, "soft_cap");
  in.left = integer(attributes, "left", -1, INT32_MAX);
  in.right = integer(attributes, "right", -1, INT32_MAX);
  const auto ints = [&](const char* name, std::initializer_list<int64_t> shape) {
    const auto buffer = operand(operands, next++);
    require_shape(name, buffer, Type::S32, shape);
    return static_cast<const int*>(buffer.untyped_data());
  };
  if (attribute<bool>(attributes, "starts")) {
    in.query_starts = ints("query_starts", {in.batch, 2});
    in.key_starts = ints("key_starts", {in.batch, 2});
  }
  if (attribute<bool>(attributes, "segments")) {
    const auto bounds = [](int64_t rows) { return (rows + kBoundRows - 1) / kBoundRows; };
    in.query_segments = ints("query_segments", {in.batch, in.num_queries});
    in.key_segments = ints("key_segments", {in.batch, in.num_keys});
    in.query_bounds = ints("query_bounds", {in.batch, bounds(in.num_queries), 2});
    in.key_bounds = ints("key_bounds", {in.batch, bounds(in.num_keys), 2});
  }
  return in;
}

// Whether a result is float32, rather than of the operands' type.
inline bool is_float32(const xla::ffi::AnyBuffer& out, const AttentionShape& in) {
  using Type = xla::ffi::DataType;
  const Type half = in.bfloat16 ? Type::BF16 : Type::F16;
  if (out.element_type() != half && out.element_type() != Type::F32)
    throw Error("a result must be of the operands' type, or float32");
  return out.element_type() == Type::F32;
}

}  // namespace pk
