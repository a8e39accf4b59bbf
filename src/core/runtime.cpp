#include "fusedmoe/runtime.h"

#include "core/check.h"
#include "core/device_runtime.h"

namespace fusedmoe {
namespace {

using core::check_contiguous;
using core::runtime_of;

std::size_t size_of(const TensorView& view) {
  return static_cast<std::size_t>(view.nbytes());
}

void check_stream(Stream stream, Device device) {
  FUSEDMOE_CHECK_FAULT(stream.device == device, kDevice, "stream",
                       core::format("of {}", to_string(stream.device)),
                       core::format("of {}", to_string(device)));
}

}  // namespace

void copy(const TensorView& source, const TensorView& destination, Stream stream) {
  check_contiguous(source, "source");
  check_contiguous(destination, "destination");
  core::check_tensor(destination, "destination", source.dtype(), source.shape());
  const bool on_cuda = !source.device().is_cpu() || !destination.device().is_cpu();
  FUSEDMOE_CHECK_FAULT(!on_cuda || !stream.device.is_cpu(), kDevice, "stream", "of cpu",
                       "of cuda, as one of the tensors");
  if (source.numel() == 0) return;
  runtime_of(stream.device).copy(destination.data(), source.data(), size_of(source), stream);
}

void fill_bytes(const TensorView& view, std::uint8_t value, Stream stream) {
  check_contiguous(view, "view");
  check_stream(stream, view.device());
  if (view.numel() == 0) return;
  runtime_of(stream.device).fill(view.data(), value, size_of(view), stream);
}

Tensor to_device(const Tensor& tensor, Device device) {
  if (tensor.device() == device) return tensor;
  check_contiguous(tensor, "tensor");
  Tensor result = Tensor::empty(tensor.shape(), tensor.dtype(), device);
  const Stream stream{device.is_cpu() ? tensor.device() : device};
  copy(tensor, result, stream);
  synchronize(stream);
  return result;
}

void synchronize(Stream stream) {
  runtime_of(stream.device).synchronize(stream);
}

CurrentDevice::CurrentDevice(Device device)
    : previous_(device.is_cpu() ? -1 : core::cuda_runtime().exchange_current(device)) {}
CurrentDevice::~CurrentDevice() {
  if (previous_ >= 0) core::cuda_runtime().restore_current(previous_);
}

OwnedStream::OwnedStream(Device device)
    : device_(device), handle_(runtime_of(device).make_stream(device)) {}

Event::Event(Device device) : device_(device), handle_(runtime_of(device).make_event(device)) {}

void Event::record(Stream stream) {
  check_stream(stream, device_);
  runtime_of(device_).record(handle_.get(), stream);
}

void Event::synchronize() const {
  runtime_of(device_).synchronize_event(handle_.get());
}

void Event::wait(Stream stream) const {
  FUSEDMOE_CHECK_FAULT(stream.device.kind == device_.kind, kDevice, "stream",
                       core::format("of {}", to_string(stream.device)),
                       "of the event's kind of device");
  runtime_of(device_).wait(handle_.get(), stream);
}

double elapsed_ms(const Event& start, const Event& end) {
  FUSEDMOE_CHECK_FAULT(start.device_ == end.device_, kDevice, "end",
                       core::format("on {}", to_string(end.device_)),
                       core::format("on {}, as start", to_string(start.device_)));
  start.synchronize();
  end.synchronize();
  return runtime_of(start.device_).elapsed_ms(start.handle_.get(), end.handle_.get());
}

Graph::Graph(Stream stream, const std::function<void()>& work) : device_(stream.device) {
  FUSEDMOE_CHECK_FAULT(work, kNull, "work", "empty", "a function");
  FUSEDMOE_CHECK(device_.is_cpu() || stream.handle, "stream", "the default stream",
                 "a stream of its own, which can be captured");
  handle_ = runtime_of(device_).capture(stream, work);
}

void Graph::launch(Stream stream) const {
  check_stream(stream, device_);
  runtime_of(device_).launch(handle_.get(), stream);
}

bool is_capturing(Stream stream) {
  return runtime_of(stream.device).is_capturing(stream);
}

}  // namespace fusedmoe
