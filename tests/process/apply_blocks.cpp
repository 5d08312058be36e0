// One product of the kernels as a program, for processors that can only be emulated:
// apply_blocks TYPE ROWS COLS TOKENS, blocks and activations on standard input, products on standard output.
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "kernels.cpp"

int main(int count, char** words) {
  if (count != 5) return 2;
  const int type = std::atoi(words[1]), rows = std::atoi(words[2]), cols = std::atoi(words[3]);
  const int tokens = std::atoi(words[4]);
  std::vector<uint8_t> file(rows * blocks::row_bytes(type, cols)), quantised(tokens * quantised_bytes(cols));
  std::vector<float> x(static_cast<size_t>(tokens) * cols), y(static_cast<size_t>(tokens) * rows);
  if (std::fread(file.data(), 1, file.size(), stdin) != file.size()) return 3;
  if (std::fread(x.data(), 4, x.size(), stdin) != x.size()) return 3;
  void* packed = std::aligned_alloc(64, (packed_bytes(type, rows, cols) + 127) / 64 * 64);
  std::vector<int32_t> order(rows + blocks::kStrip);  // as they are; qemu 7 reads what a masked load of AVX2 must not
  std::iota(order.begin(), order.end(), 0);
  pack(type, rows, cols, file.data(), order.data(), static_cast<uint8_t*>(packed), 1);
  const Matrix matrix{packed, nullptr, rows, cols, type};
  apply(&matrix, x.data(), tokens, quantised.data(), y.data());
  std::fprintf(stderr, "%s", block_kernel());
  std::fwrite(y.data(), 4, y.size(), stdout);
  return 0;
}
