// FlashInfer's all-reduce with residual and RMS norm for 16-bit floats and 2, 4 or 8 ranks, without its other patterns: its own
// source instantiates 200 kernels, which takes a quarter of an hour.
#include <cstdint>
#include <string>
#include <vector>

#include "flashinfer/comm/trtllm_allreduce_fusion.cuh"
#include "tvm_ffi_utils.h"

namespace fusion = flashinfer::trtllm_allreduce_fusion;
using tvm::ffi::Optional;

template <typename T, int kRanks>
cudaError_t launch(fusion::AllReduceFusionParams<T> const& params, bool pdl) {
  constexpr auto pattern = fusion::AllReduceFusionPattern::kARResidualRMSNorm;
  return fusion::allreduce_fusion_kernel_launcher<pattern, T, kRanks, true>(params, pdl);
}

template <typename T>
void run(TensorView in, int64_t ranks, int64_t rank, int64_t tokens, int64_t hidden, TensorView workspace, bool pdl,
         bool oneshot, bool trigger_at_end, TensorView residual_in, TensorView residual_out, TensorView norm_out,
         TensorView gamma, double eps, double weight_bias) {
  fusion::AllReduceFusionParams<T> params{};
  params.nranks = ranks;
  params.rank = rank;
  params.size = tokens * hidden;
  params.hidden_dim = hidden;
  params.workspace = reinterpret_cast<void**>(workspace.data_ptr());
  params.allreduce_in = in.data_ptr();
  params.residual_in = residual_in.data_ptr();
  params.residual_out = residual_out.data_ptr();
  params.norm_out = norm_out.data_ptr();
  params.rms_gamma = gamma.data_ptr();
  params.rms_eps = static_cast<float>(eps);
  params.weight_bias = static_cast<float>(weight_bias);
  params.use_oneshot = oneshot;
  params.pattern = fusion::AllReduceFusionPattern::kARResidualRMSNorm;
  params.trigger_completion_at_end = trigger_at_end;
  params.stream = get_stream(in.device());
  auto status = ranks == 2 ? launch<T, 2>(params, pdl) : ranks == 4 ? launch<T, 4>(params, pdl) : launch<T, 8>(params, pdl);
  TVM_FFI_ICHECK(status == cudaSuccess) << "the launch failed: " << cudaGetErrorString(status);
}

// The arguments of FlashInfer's function of this name. This pattern writes no sum: `out` stays as it is.
void trtllm_allreduce_fusion(TensorView in, int64_t ranks, int64_t rank, int64_t tokens, int64_t hidden,
                             TensorView workspace, bool pdl, bool oneshot, bool trigger_at_end, bool fp32_acc,
                             int64_t pattern, Optional<TensorView> out, Optional<TensorView> residual_in,
                             Optional<TensorView> residual_out, Optional<TensorView> norm_out,
                             Optional<TensorView> quant_out, Optional<TensorView> scale_out, Optional<TensorView> gamma,
                             Optional<double> eps, Optional<TensorView> scale_factor, Optional<int64_t> layout,
                             Optional<int64_t> group_size, Optional<double> weight_bias) {
  ffi::CUDADeviceGuard guard(in.device().device_id);
  TVM_FFI_ICHECK(fp32_acc && pattern == 1 && (ranks == 2 || ranks == 4 || ranks == 8))
      << "this build sums in fp32 over 2, 4 or 8 ranks, with residual and norm";
  auto code = encode_dlpack_dtype(in.dtype());
  TVM_FFI_ICHECK(code == bfloat16_code || code == float16_code) << "this build takes bf16 and fp16";
  auto call = code == bfloat16_code ? run<__nv_bfloat16> : run<half>;
  call(in, ranks, rank, tokens, hidden, workspace, pdl, oneshot, trigger_at_end, residual_in.value(), residual_out.value(),
       norm_out.value(), gamma.value(), eps.value(), weight_bias.value_or(0.0));
}

// Minus zero everywhere: what the kernel takes for "not there yet".
void trtllm_lamport_initialize(int64_t buffer, int64_t size, DLDataType dtype) {
  TVM_FFI_ICHECK(dtype.bits == 16) << "this build takes 16-bit buffers";
  std::vector<uint16_t> zeros(size, 0x8000);
  TVM_FFI_ICHECK(cudaMemcpy(reinterpret_cast<void*>(buffer), zeros.data(), size * 2, cudaMemcpyHostToDevice) == cudaSuccess);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(trtllm_allreduce_fusion, trtllm_allreduce_fusion);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(trtllm_lamport_initialize, trtllm_lamport_initialize);
