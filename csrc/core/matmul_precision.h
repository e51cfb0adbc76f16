#pragma once
namespace emb {
enum class MatmulPrecision : int { kFloat32, kTf32, kBf16 };
inline constexpr const char* kMatmulPrecisions[] = {"float32", "tf32", "bf16"};
}
