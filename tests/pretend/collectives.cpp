// Collectives of tensors on the pretend GPUs: gloo on copies in host memory, in the place of NCCL.
// As there, outputs are written by a wait for the work and in stream order, and the host does not
// wait when it starts them.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "torch_device.h"

namespace {

using at::Tensor;
using c10d::Work;
using torch::jit::Stack;

struct Output {
  Tensor on_device, on_host;
};

// The work of a collective: whoever waits for it gets the outputs in the order of its stream.
class StagedWork final : public Work {
 public:
  StagedWork(c10::intrusive_ptr<Work> work, std::vector<Output> outputs)
      : Work(-1, work->retrieveOpType()), work_(std::move(work)), outputs_(std::move(outputs)) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  void abort() override { work_->abort(); }
  void synchronize() override { wait(kNoTimeout); }

  std::vector<Tensor> result() override {
    std::vector<Tensor> tensors;
    for (const Output& output : outputs_) tensors.push_back(output.on_device);
    return tensors;
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = work_->wait(timeout);
    write_outputs();
    return done;
  }

  // NCCL's is complete at once, and outputs come in stream order: here they are written already.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::Device> devices;
    if (!outputs_.empty()) devices.push_back(outputs_[0].on_device.device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::move(devices));
    wait(kNoTimeout);
    future->markCompleted(c10::IValue(result()));
    return future;
  }

 private:
  void write_outputs() {
    const std::lock_guard<std::mutex> lock(once_);
    if (is_written_) return;
    is_written_ = true;
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    for (Output& output : outputs_) output.on_device.copy_(output.on_host, true);
  }

  c10::intrusive_ptr<Work> work_;
  std::vector<Output> outputs_;
  std::mutex once_;
  bool is_written_ = false;
};

// Copies of the arguments in host memory.
class Staging {
 public:
  std::vector<Output> outputs;

  c10::IValue stage(const c10::IValue& value, bool is_output) {
    if (value.isTensor()) return stage_tensor(value.toTensor(), is_output);
    if (value.isTensorList()) return stage_list(value.toTensorVector(), is_output);
    if (!is_list_of_lists(value)) return value;
    std::vector<std::vector<Tensor>> lists;
    for (const c10::IValue& list : value.toListRef()) {
      lists.push_back(stage_list(list.toTensorVector(), is_output));
    }
    return lists;
  }

 private:
  static bool is_list_of_lists(const c10::IValue& value) {
    return value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList();
  }

  std::vector<Tensor> stage_list(const std::vector<Tensor>& list, bool is_output) {
    std::vector<Tensor> staged;
    for (const Tensor& t : list) staged.push_back(stage_tensor(t, is_output));
    return staged;
  }

  Tensor stage_tensor(const Tensor& t, bool is_output) {
    if (!t.defined() || !t.is_cuda()) return t;
    const Tensor host = t.to(at::kCPU);
    if (is_output) outputs.push_back({t, host});
    return host;
  }
};

bool is_output(const c10::OperatorHandle& op, size_t argument) {
  const std::string& name = op.schema().arguments()[argument].name();
  const bool is_in_place = name == "tensors" && op.schema().name() != "c10d::send";
  return is_in_place || name.rfind("output", 0) == 0;
}

// torch's kernels by operation: they call the backend of the group for CUDA, which is gloo here.
std::map<std::string, c10::SafeKernelFunction>& kernels_of_torch() {
  static std::map<std::string, c10::SafeKernelFunction> kernels;
  return kernels;
}

void run_collective(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const std::string& name = op.schema().name();
  pretend::refuse_while_capturing(pretend::interned(name + " over gloo"));
  const size_t count = op.schema().arguments().size();
  const Stack given(stack->end() - static_cast<int64_t>(count), stack->end());
  Staging staging;
  {
    const pretend::QuietWaits quiet;
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    auto argument = stack->end() - static_cast<int64_t>(count);
    for (size_t i = 0; i < count; ++i) argument[i] = staging.stage(given[i], is_output(op, i));
  }
  kernels_of_torch().at(name).callBoxed(op, keys, stack);
  // Results are the first argument and the work.
  auto work = stack->back().toCustomClass<Work>();
  stack->back() = c10::IValue(c10::intrusive_ptr<Work>(
      c10::make_intrusive<StagedWork>(std::move(work), std::move(staging.outputs))));
  if (op.schema().returns().size() == 2) stack->end()[-2] = given[0];
}

const int replaced = [] {
  static torch::Library library(torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__,
                                __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& found : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    if (found.name.rfind("c10d::", 0) != 0 || found.name == "c10d::barrier") continue;
    const auto op = dispatcher.findSchemaOrThrow(found.name.c_str(), found.overload_name.c_str());
    kernels_of_torch().emplace(found.name,
                               op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA));
    library.impl(found.name.c_str() + 6,
                 torch::CppFunction::makeFromBoxedFunction<&run_collective>());
  }
  return 0;
}();

}  // namespace

namespace c10d {

// DistributedDataParallel times its steps on the device: there is nothing to measure here.
struct PretendTimer final : Timer {
  explicit PretendTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
// A torch built with CUDA has one already.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(TimerRegistry, c10::kCUDA, c10::REGISTRY_PREFERRED,
                                       PretendTimer)

}  // namespace c10d
