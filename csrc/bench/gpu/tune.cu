// Variants of the hot kernels, to be timed beside each other by tune.py: which block sizes and unrolls, on bfloat16 with entropy.
#define RL_CSRC_TUNE
#include "../../native/cuda/fused.cu"
#include "../../native/cuda/logprobs.cu"

#include <vector>

namespace tune {

using namespace rl;
using Bf16 = __nv_bfloat16;

struct Job {
  rl_logits in;
  rl_logprobs_out out;
  rl_logprobs_grad grad;
  rl_loss_spec spec;
  rl_loss_tokens tokens;
  rl_fused_out fused;
};

struct Variant {
  const char* name;
  int (*run)(const Job&, void*);
};

template <int THREADS, int UNROLL, int BLOCKS>
int forward_variant(const Job& j, void* stream) {
  return launch(forward_kernel<Bf16, kDot, THREADS, UNROLL, BLOCKS>, j.in.rows, THREADS, stream, j.in, j.out, nullptr);
}

template <int UNROLL, int TILES>
int backward_variant(const Job& j, void* stream) {
  const int64_t chunks = ceil_div(j.in.vocab, int64_t(kBackwardThreads) * UNROLL * TILES * 8);
  return launch(backward_kernel<Bf16, Bf16, 0, UNROLL, TILES>, chunks * j.in.rows, kBackwardThreads, stream, j.in, j.grad, unsigned(chunks));
}

template <typename T, int CLUSTER, int THREADS, int N>
int fused_variant(const Job& j, void* stream) {
  if (ceil_div(j.in.vocab, Element<T>::kPerVec) > CLUSTER * THREADS * N) return int(cudaErrorNotSupported);
  return launch_rows<T, kDot, CLUSTER, THREADS, N>(j.in, j.spec, j.tokens, j.fused, stream);
}

template <typename T, int MODE, int CLUSTER, int THREADS, int N, int BLOCKS>
int streaming_variant(const Job& j, void* stream) {
  if (ceil_div(j.in.vocab, Element<T>::kPerVec) > CLUSTER * THREADS * N) return int(cudaErrorNotSupported);
  return launch_streaming<T, MODE, CLUSTER, THREADS, N, BLOCKS>(j.in, j.spec, j.tokens, j.fused, stream);
}

const Variant kVariants[] = {
    {"forward 256x4 (4)", forward_variant<256, 4, 4>},
    {"backward 4x1", backward_variant<4, 1>},
    {"fused 8x256x10", fused_variant<Bf16, 8, 256, 10>},
    {"stream 8x256x10x3 plain", streaming_variant<Bf16, 0, 8, 256, 10, 3>},
    {"stream 8x256x10x3", streaming_variant<Bf16, kDot, 8, 256, 10, 3>},
    {"stream 8x320x8x2 plain", streaming_variant<Bf16, 0, 8, 320, 8, 2>},
    {"stream 8x512x5x2 plain", streaming_variant<Bf16, 0, 8, 512, 5, 2>},
    {"stream 4x512x10x1 plain", streaming_variant<Bf16, 0, 4, 512, 10, 1>},
    {"stream 4x512x10x2 plain", streaming_variant<Bf16, 0, 4, 512, 10, 2>},
    {"stream 2x1024x10x1 plain", streaming_variant<Bf16, 0, 2, 1024, 10, 1>},
    {"stream f32 8x512x10x1 plain", streaming_variant<float, 0, 8, 512, 10, 1>},
    {"stream f32 8x512x10x2 plain", streaming_variant<float, 0, 8, 512, 10, 2>},
    {"stream f32 8x512x10x2", streaming_variant<float, kDot, 8, 512, 10, 2>},
    {"stream f32 4x1024x10x1 plain", streaming_variant<float, 0, 4, 1024, 10, 1>},
};

}  // namespace tune

using namespace tune;

extern "C" int rl_tune_count() { return int(sizeof(kVariants) / sizeof(kVariants[0])); }
extern "C" const char* rl_tune_name(int i) { return kVariants[i].name; }
extern "C" int rl_tune_run(int i, const void* data, int64_t rows, int64_t vocab, int dtype, int grad_dtype, const int64_t* labels,
                           float* scratch, const uint8_t* mask, void* grad_logits, int64_t grad_stride, void* stream) {
  Job j{};
  j.in.data = data;
  j.in.row_stride = vocab;
  j.in.vocab = vocab;
  j.in.rows = rows;
  j.in.labels = labels;
  j.in.scalar_temperature = 1.f;
  j.in.dtype = dtype;
  j.out = {scratch, scratch + rows, nullptr, scratch + 2 * rows};
  j.grad = {scratch, scratch + 2 * rows, nullptr, scratch + 3 * rows, nullptr, grad_logits, grad_stride};
  j.tokens = {scratch, scratch + 3 * rows, mask, nullptr, nullptr, nullptr, 1.f};
  j.spec.clip_low = j.spec.clip_high = 0.2f;
  j.fused.logprobs = scratch + 4 * rows;
  j.fused.entropy = scratch + 5 * rows;
  j.fused.grad_logits = grad_logits;
  j.fused.grad_stride = grad_stride;
  j.fused.grad_dtype = grad_dtype;
  return kVariants[i].run(j, stream);
}
