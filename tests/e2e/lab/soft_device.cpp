// An accelerator in software, of torch's kind for other packages' devices (PrivateUse1): its memory is the host's, and
// each of its streams is a thread that does what it was told in order, behind the host. Built by support/soft_device.py.
//
// Every operation goes through one function, `run`. It asks torch's "meta" device what comes out, allocates that,
// returns, and leaves the work to the current stream, which does it with the CPU's kernels on the same memory. An
// operation of which only its numbers say what comes out (`item`, `nonzero`), or that draws from a generator, waits for
// the stream first: so does the host of a GPU in the first case.
//
// A kernel that fails (an index out of range) breaks the device for the rest of the process, as on a GPU: what it was
// told before and after is not done, and every later call raises.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/strides.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <set>
#include <thread>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using Clock = std::chrono::steady_clock;
using Task = std::function<void()>;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex DEVICES = 8;
constexpr int STREAMS = 16;  // of each device; the first is the default one

// --- streams: threads that are never joined

std::atomic<long> unfinished{0};

struct Unlocked {  // without the interpreter's lock, which what is waited for may need
  PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~Unlocked() {
    if (state) PyEval_RestoreThread(state);
  }
};

std::mutex error_mutex;
std::string error_text;  // of the first kernel that failed
std::atomic<bool> has_failed{false};

void fail(const std::string& text) {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (!has_failed) error_text = text.substr(0, text.find('\n'));
  has_failed = true;
}

void check() {
  if (!has_failed) return;
  std::lock_guard<std::mutex> lock(error_mutex);
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710, "SOFT error: a kernel failed: " + error_text);
}

class Worker {
 public:
  // `is_mark`: it says where the stream is, also on a device that has failed.
  void add(Task task, bool is_mark = false) {
    if (!is_mark) {
      check();
      task = [task = std::move(task)] {
        if (!has_failed) task();
      };
    }
    ++unfinished;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_started_) {
      is_started_ = true;
      std::thread([this] { run(); }).detach();
    }
    tasks_.push_back(std::move(task));
    ++told_;
    changed_.notify_all();
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ == told_;
  }

  void wait() {
    {
      const Unlocked others_run;
      std::unique_lock<std::mutex> lock(mutex_);
      const auto until = told_;
      changed_.wait(lock, [&] { return done_ >= until || has_failed; });
    }
    check();
  }

 private:
  void run() {
    while (true) {
      Task task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      try {
        task();
      } catch (const std::exception& error) {
        fail(error.what());
      }
      task = nullptr;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        ++done_;
      }
      --unfinished;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  long told_ = 0, done_ = 0;
  bool is_started_ = false;
};

Worker& worker(DeviceIndex device, int64_t stream) {
  static auto* all = new Worker[DEVICES * STREAMS];
  return all[device * STREAMS + stream];
}

thread_local DeviceIndex current_device = 0;
thread_local int64_t current_stream[DEVICES] = {};
std::atomic<bool> is_touched{false};
std::atomic<int> next_stream{1};

Worker& current() { return worker(current_device, current_stream[current_device]); }

void wait_for_device(DeviceIndex device) {
  for (int stream = 0; stream < STREAMS; ++stream) worker(device, stream).wait();
}

struct Moment {  // one recording of an event
  std::mutex mutex;
  std::condition_variable changed;
  bool is_past = false;
  Clock::time_point at;

  void pass() {
    std::lock_guard<std::mutex> lock(mutex);
    is_past = true;
    at = Clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return is_past; });
  }
};

struct Event {
  std::shared_ptr<Moment> moment;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override {
    const Device old(KIND, current_device);
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return Device(KIND, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "soft device: invalid device ordinal");
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(Device device) const override { return stream(device, current_stream[index(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    return stream(device, 1 + next_stream++ % (STREAMS - 1));
  }
  c10::Stream exchangeStream(c10::Stream wanted) const override {
    auto& id = current_stream[wanted.device_index()];
    const auto old = stream(wanted.device(), id);
    id = wanted.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    auto moment = std::make_shared<Moment>();
    static_cast<Event*>(*event)->moment = moment;
    worker(stream.device_index(), stream.id()).add([moment] { moment->pass(); }, true);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    auto moment = static_cast<Event*>(event)->moment;
    if (moment) worker(stream.device_index(), stream.id()).add([moment] { moment->wait(); }, true);
  }
  bool queryEvent(void* event) const override {
    check();
    if (event == nullptr || !static_cast<Event*>(event)->moment) return true;
    auto& moment = *static_cast<Event*>(event)->moment;
    std::lock_guard<std::mutex> lock(moment.mutex);
    return moment.is_past;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr || !static_cast<Event*>(event)->moment) return;
    {
      const Unlocked others_run;
      static_cast<Event*>(event)->moment->wait();
    }
    check();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    auto& began = *static_cast<Event*>(from)->moment;
    auto& ended = *static_cast<Event*>(to)->moment;
    return std::chrono::duration<double, std::milli>(ended.at - began.at).count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    check();
    return worker(stream.device_index(), stream.id()).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    worker(stream.device_index(), stream.id()).wait();
  }
  void synchronizeDevice(const DeviceIndex device) const override { wait_for_device(device); }

 private:
  static DeviceIndex index(Device device) { return device.index() < 0 ? current_device : device.index(); }
  static c10::Stream stream(Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(KIND, index(device)), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- memory: given back when no stream has anything to do, since a kernel that was queued may still use it

std::mutex memory_mutex;
std::vector<void*> given_up;
std::set<std::pair<uintptr_t, uintptr_t>> pinned;

void give_back(void* memory) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  given_up.push_back(memory);
  if (given_up.size() > 256 && unfinished == 0) {
    for (void* one : given_up) std::free(one);
    given_up.clear();
  }
}

void* memory_of(size_t size) { return size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr; }

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    is_touched = true;
    void* memory = memory_of(size);
    return {memory, memory, &give_back, Device(KIND, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* of, std::size_t count) const override { default_copy_data(to, of, count); }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = memory_of(size);
    std::lock_guard<std::mutex> lock(memory_mutex);
    const auto at = reinterpret_cast<uintptr_t>(memory);
    if (memory) pinned.insert({at, at + size});
    return {memory, memory, &unpin, Device(c10::DeviceType::CPU)};
  }
  static void unpin(void* memory) {
    {
      std::lock_guard<std::mutex> lock(memory_mutex);
      const auto found = pinned.lower_bound({reinterpret_cast<uintptr_t>(memory), 0});
      if (found != pinned.end() && found->first == reinterpret_cast<uintptr_t>(memory)) pinned.erase(found);
    }
    give_back(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* of, std::size_t count) const override { default_copy_data(to, of, count); }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(KIND, &device_memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return is_touched; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(KIND, device)); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(KIND, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    const auto at = reinterpret_cast<uintptr_t>(data);
    auto found = pinned.upper_bound({at, UINTPTR_MAX});
    return found != pinned.begin() && (--found)->first <= at && at < found->second;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void*) const override { return Device(KIND, current_device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto old_size = storage.nbytes();
    auto fresh = device_memory.allocate(size);
    if (auto kept = std::min(old_size, size)) {
      current().wait();
      std::memcpy(fresh.mutable_get(), storage.data(), kept);
    }
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
};

// --- operations

at::Tensor on_host(const at::Tensor& tensor) {  // the same memory, as a tensor of the CPU
  auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  if (!tensor.storage().data()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options, at::Device(at::kCPU));
}

at::Tensor as_meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

template <typename Change>
IValue changed(const IValue& value, const Change& change, at::DeviceType kind) {
  if (value.isTensor()) return is_ours(value.toTensor()) ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> found;
    for (at::Tensor one : value.toTensorList()) found.push_back(is_ours(one) ? change(one) : one);
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> found;
    for (std::optional<at::Tensor> one : value.toOptionalTensorList())
      found.push_back(one && is_ours(*one) ? std::optional<at::Tensor>(change(*one)) : one);
    return found;
  }
  if (value.isDevice() && value.toDevice().type() == KIND) return Device(kind);
  return value;
}

void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowAutograd below;
  at::NoGradGuard none;
  op.callBoxed(stack);
}

std::mutex draw_mutex;
at::Tensor generator_state;  // of the device's own generator

// Draws from the device's generator by the CPU's, whose state is as before afterwards.
void call_with_generator(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return call_on_host(op, stack);
  std::lock_guard<std::mutex> lock(draw_mutex);
  auto generator = at::detail::getDefaultCPUGenerator();
  const auto kept = generator.get_state();
  if (generator_state.defined()) generator.set_state(generator_state);
  call_on_host(op, stack);
  generator_state = generator.get_state();
  generator.set_state(kept);
}

// The argument that a result is, or shares its memory with; -1 for a new one.
int argument_of(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (!result.alias_info()) return -1;
  for (size_t index = 0; index < schema.arguments().size(); ++index) {
    const auto* own = schema.arguments()[index].alias_info();
    if (own && own->beforeSets() == result.alias_info()->beforeSets()) return static_cast<int>(index);
  }
  return -1;
}

at::Tensor own_like(const at::Tensor& model, Device device) {
  return at::empty_strided(model.sizes(), model.strides(), model.options().device(device).pinned_memory(false));
}

Device device_of(const torch::jit::Stack& arguments) {
  for (const auto& value : arguments) {
    if (value.isTensor() && is_ours(value.toTensor())) return value.toTensor().device();
    if (value.isTensorList())
      for (at::Tensor one : value.toTensorList())
        if (is_ours(one)) return one.device();
    if (value.isDevice() && value.toDevice().type() == KIND && value.toDevice().has_index()) return value.toDevice();
  }
  return Device(KIND, current_device);
}

// Now, behind all that the stream was told.
void run_now(const c10::OperatorHandle& op, torch::jit::Stack* stack, const torch::jit::Stack& arguments) {
  const auto& schema = op.schema();
  current().wait();
  torch::jit::Stack host;
  for (const auto& value : arguments) host.push_back(changed(value, on_host, at::kCPU));
  call_with_generator(op, host);
  const auto device = device_of(arguments);
  for (size_t index = 0; index < schema.returns().size(); ++index) {
    const auto& result = schema.returns()[index];
    const int same = argument_of(schema, result);
    if (same >= 0 && result.alias_info()->isWrite()) {
      if (arguments[same].isTensor() && is_ours(arguments[same].toTensor())) {
        const auto& target = arguments[same].toTensor();
        const auto& made = host[index].toTensor();
        if (target.sizes() != made.sizes()) target.resize_(made.sizes());
        if (target.numel() && target.data_ptr() != made.data_ptr()) on_host(target).copy_(made);
      }
      stack->push_back(arguments[same]);
    } else if (same >= 0 && host[index].isTensor() && is_ours(arguments[same].toTensor())) {
      const auto& made = host[index].toTensor();
      const auto& base = arguments[same].toTensor();
      const auto offset = base.storage_offset() +
          (static_cast<char*>(made.data_ptr()) - static_cast<char*>(base.data_ptr())) / base.element_size();
      stack->push_back(base.as_strided(made.sizes(), made.strides(), offset));
    } else {
      const auto bring = [&](const at::Tensor& made) {
        if (!made.defined()) return made;
        auto own = own_like(made, device);
        if (own.numel()) on_host(own).copy_(made);
        return own;
      };
      if (host[index].isTensor()) {
        stack->push_back(bring(host[index].toTensor()));
      } else if (host[index].isTensorList()) {
        c10::List<at::Tensor> found;
        for (at::Tensor one : host[index].toTensorList()) found.push_back(bring(one));
        stack->push_back(found);
      } else {
        stack->push_back(host[index]);
      }
    }
  }
}

bool can_wait(const c10::OperatorHandle& op) {
  for (auto tag : {at::Tag::data_dependent_output, at::Tag::dynamic_output_shape, at::Tag::nondeterministic_seeded})
    if (op.hasTag(tag)) return false;
  for (const auto& result : op.schema().returns()) {
    if (result.type()->kind() != c10::TypeKind::TensorType) return false;
    if (result.alias_info() && !result.alias_info()->isWrite()) return false;
  }
  return true;
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  torch::jit::Stack arguments(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  const c10::DeviceGuard guard(device_of(arguments));  // its stream, whichever device is the current one
  torch::jit::Stack meta;
  bool is_late = can_wait(op);
  if (is_late) {
    try {
      for (const auto& value : arguments) meta.push_back(changed(value, as_meta, at::kMeta));
      call_on_host(op, meta);
    } catch (const std::exception&) {
      is_late = false;  // nobody says what comes out, or the arguments are wrong, which the CPU says better
    }
  }
  for (size_t index = 0; is_late && index < schema.returns().size(); ++index) {
    const auto& result = schema.returns()[index];
    const int same = argument_of(schema, result);
    if (same < 0) continue;
    is_late = arguments[same].isTensor() && is_ours(arguments[same].toTensor()) &&
        arguments[same].toTensor().sizes() == meta[index].toTensor().sizes();
  }
  if (!is_late) {
    run_now(op, stack, arguments);
    return;
  }
  const auto device = device_of(arguments);
  std::vector<at::Tensor> results;  // empty where it is an argument
  for (size_t index = 0; index < schema.returns().size(); ++index) {
    const int same = argument_of(schema, schema.returns()[index]);
    at::Tensor own;
    if (same >= 0) {
      stack->push_back(arguments[same]);
    } else {
      const auto& made = meta[index].toTensor();
      if (made.defined()) own = own_like(made, device);
      stack->push_back(own);
    }
    results.push_back(own.defined() && own.numel() ? on_host(own) : at::Tensor());
  }
  auto host = std::make_shared<torch::jit::Stack>();
  for (const auto& value : arguments) host->push_back(changed(value, on_host, at::kCPU));
  auto handle = op;
  current().add([handle, host, results] {
    call_on_host(handle, *host);
    at::NoGradGuard none;
    for (size_t index = 0; index < results.size(); ++index)
      if (results[index].defined() && (*host)[index].toTensor().numel())  // the CPU leaves out what it does not need
        at::Tensor(results[index]).copy_((*host)[index].toTensor());
  });
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device && device->has_index() ? *device : Device(KIND, current_device));
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device && device->has_index() ? *device : Device(KIND, current_device));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type));
}

at::Tensor part_of(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return view;
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  auto meta = as_meta(self).view(size);
  return part_of(self, meta.sizes(), meta.strides(), std::nullopt);
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  auto meta = as_meta(self).unfold(dimension, size, step);
  return part_of(self, meta.sizes(), meta.strides(), std::nullopt);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  return at::native::resize_(self, size, std::nullopt);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      size, stride.size() == size.size() ? at::DimVector(stride) : c10::contiguous_strides(size), offset);
  return self;
}

// What leaves the device for memory that is not pinned is there when the call returns, as on a GPU.
at::Tensor& copy(at::Tensor& self, const at::Tensor& of, bool is_async) {
  if (of.sizes() != self.sizes()) return copy(self, of.expand(self.sizes()), is_async);
  const auto& owner = is_ours(self) ? self : of;
  const c10::DeviceGuard guard(owner.device());
  auto target = is_ours(self) ? on_host(self) : self;
  auto source = is_ours(of) ? on_host(of) : of;
  if (!is_ours(of) && !(is_async && of.is_pinned())) source = source.clone();  // the host's may change at once
  current().add([target, source]() mutable {
    at::NoGradGuard none;
    target.copy_(source);
  });
  if (!is_ours(self) && !(is_async && self.is_pinned())) current().wait();
  return self;
}

at::Tensor copy_from(const at::Tensor& of, const at::Tensor& self, bool is_async) {
  auto target = self;
  return copy(target, of, is_async);
}

at::Scalar item(const at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  current().wait();
  return on_host(self).item();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

// Autocast changes nothing on it: all is computed in the types that it is given.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &part_of);
  m.impl("view", &view);
  m.impl("unfold", &unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("copy_", &copy);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &item);
}

}  // namespace

PYBIND11_MODULE(soft_device, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("is_touched", [] { return is_touched.load(); });
  m.def("touch", [] { is_touched = true; });
  m.def("get_rng_state", [] {
    std::lock_guard<std::mutex> lock(draw_mutex);
    if (!generator_state.defined()) generator_state = at::detail::createCPUGenerator(7).get_state();
    return generator_state.clone();
  });
  m.def("set_rng_state", [](const at::Tensor& state) {
    std::lock_guard<std::mutex> lock(draw_mutex);
    generator_state = state.clone();
  });
  m.def("manual_seed", [](uint64_t seed) {
    std::lock_guard<std::mutex> lock(draw_mutex);
    generator_state = at::detail::createCPUGenerator(seed).get_state();
  });
  m.def("synchronize", [](int device) { wait_for_device(device); }, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("on_host", [](const at::Tensor& tensor) { return on_host(tensor.detach()); });
  m.def("sleep", [](double seconds) { current().add([seconds] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }); });
  m.def("add", [](pybind11::function task) {  // to the current stream; it has the interpreter's lock
    auto kept = std::shared_ptr<pybind11::function>(new pybind11::function(std::move(task)), [](pybind11::function* gone) {
      pybind11::gil_scoped_acquire lock;
      delete gone;
    });
    current().add([kept] {
      pybind11::gil_scoped_acquire lock;
      (*kept)();
    });
  });
}
