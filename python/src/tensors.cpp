#include "tensors.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <map>
#include <memory>
#include <utility>

#include "fusedmoe/dlpack.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/safetensors.h"
#include "module.h"

namespace fusedmoe::python {
namespace {

constexpr int kDlCpu = 1, kDlCuda = 2, kDlFloat4Code = 17;

/// A DLTensor.
struct DlTensor {
  void* data;
  struct {
    int device_type, device_id;
  } device;
  int ndim;
  nb::dlpack::dtype dtype;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};

/// A DLManagedTensorVersioned: owns the memory until `deleter` is called.
struct DlManaged {
  std::uint32_t major, minor;
  void* context;
  void (*deleter)(DlManaged*);  ///< may be null
  std::uint64_t flags;
  DlTensor tensor;
};

/// DLPackExchangeAPI of DLPack 1.3: what a type of arrays offers to C, without a call of Python.
struct DlExchange {
  std::uint32_t major, minor;
  void *previous, *allocator;
  int (*managed_from_object)(void* object, DlManaged** out);
  void* managed_to_object;
  int (*view_of)(void* object, DlTensor* out);  ///< borrows; 0 if it succeeds; may be null
};

/// A Tensor of memory that must not be written, as a read-only NumPy array.
struct ReadOnlyTensor : Tensor {
  explicit ReadOnlyTensor(Tensor tensor) : Tensor(std::move(tensor)) {}
};

const DlExchange* exchange_of(nb::handle array) {
  const nb::object capsule = nb::getattr(array.type(), "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* exchange =
      static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  return exchange->major == 1 && exchange->view_of != nullptr ? exchange : nullptr;
}

TensorView view_of_dlpack(DlTensor tensor, const char* name) {
  // PyTorch's float4_e2m1fn_x2: one element is a byte with two values.
  if (tensor.dtype.code == kDlFloat4Code && tensor.dtype.lanes == 2) {
    tensor.dtype = nb::dtype<std::uint8_t>();
  }
  try {
    return from_dlpack(tensor);
  } catch (const Error& error) {
    throw error.within(name);
  }
}

template <typename Array>
DlTensor describe_array(const Array& array) {
  return {const_cast<void*>(static_cast<const void*>(array.data())),
          {array.device_type(), array.device_id()},
          static_cast<int>(array.ndim()),
          array.dtype(),
          const_cast<std::int64_t*>(array.shape_ptr()),
          const_cast<std::int64_t*>(array.stride_ptr()),
          0};
}

/// Why the array's package does not hand it out: its first line, as PyTorch's go on with a stack.
Error refusal(const char* argument) {
  const nb::python_error error;
  const std::string text = nb::cast<std::string>(nb::str(error.value()));
  return Error::invalid(argument, std::string(argument) + ": " + text.substr(0, text.find('\n')));
}

template <typename Array>
TensorView import_view(nb::handle array, const char* name, Kept& kept) {
  if (array.is_none()) return {};
  Tensor* own = nullptr;
  if (nb::try_cast(array, own, false)) {
    kept.objects.emplace_back(name, nb::borrow(array));
    return *own;
  }
  DlTensor described{};
  if (const DlExchange* exchange = exchange_of(array)) {
    if (exchange->view_of(array.ptr(), &described) != 0) throw refusal(name);
    kept.objects.emplace_back(name, nb::borrow(array));
    return view_of_dlpack(described, name);
  }
  Array imported;
  if (!nb::try_cast(array, imported, false)) {
    throw Error(name, nb::cast<std::string>(nb::str(array.type())),
                "an array with __dlpack__ or a buffer, as of NumPy or PyTorch; outputs writable");
  }
  const TensorView view = view_of_dlpack(describe_array(imported), name);
  kept.arrays.emplace_back(imported);
  return view;
}

bool is_read_only(nb::handle array) {
  if (nb::isinstance<Tensor>(array)) return nb::isinstance<ReadOnlyTensor>(array);
  if (exchange_of(array) != nullptr) return false;
  nb::ndarray<> writable;
  return !nb::try_cast(array, writable, false);
}

nb::object object_of(Tensor tensor, bool read_only) {
  return read_only ? nb::cast(ReadOnlyTensor(std::move(tensor))) : nb::cast(std::move(tensor));
}

/// Any view as DLPack describes it, with `owner` keeping its memory alive.
template <typename... ReadOnly>
nb::object array_of(const TensorView& view, nb::handle owner) {
  const DlpackType type = dlpack_type(view.dtype());
  std::vector<std::size_t> shape(view.shape().begin(), view.shape().end());
  const nb::ndarray<nb::array_api, ReadOnly...> array(
      view.data(), shape.size(), shape.data(), owner, view.strides().begin(),
      nb::dlpack::dtype{type.code, type.bits, 1}, view.device().is_cpu() ? kDlCpu : kDlCuda,
      view.device().index);
  return nb::cast(array);
}

nb::object reinterpreted(nb::handle self, const std::string& dtype) {
  const Tensor& tensor = nb::cast<Tensor&>(self);
  const DType wanted = dtype_of(dtype, "dtype");
  if (bits(wanted) != bits(tensor.dtype())) {
    throw Error("dtype", dtype,
                "of " + std::to_string(bits(tensor.dtype())) + " bits, as " +
                    std::string(name(tensor.dtype())),
                Fault::kDType);
  }
  const TensorView view(tensor.data(), wanted, tensor.shape(), tensor.strides(), tensor.device());
  return object_of(Tensor(view, tensor.owner()), is_read_only(self));
}

/// For a consumer whose stream does not wait for the default one, on which the library worked.
void wait_for_default_stream(const Tensor& tensor, const nb::kwargs& kwargs) {
  constexpr std::int64_t kNoWait = -1, kDefault = 1;  // as DLPack numbers them; None is kDefault
  const auto stream = get<std::int64_t>(kwargs, "stream", kDefault);
  if (tensor.device().is_cpu() || stream == kNoWait || stream == kDefault) return;
  const WithoutGil no_gil;
  synchronize(Stream{tensor.device()});
}

/// Only versions of DLPack from 1.0 on can say that memory is read-only.
nb::object dlpack_of(nb::handle self, const nb::kwargs& kwargs) {
  const Tensor& tensor = nb::cast<Tensor&>(self);
  wait_for_default_stream(tensor, kwargs);
  if (!is_read_only(self)) return array_of(tensor, self).attr("__dlpack__")(**kwargs);
  const nb::object version = item(kwargs, "max_version");
  if (version.is_none() || nb::cast<int>(version[0]) < 1) {
    throw nb::buffer_error("read-only memory needs max_version=(1, 0) or later");
  }
  return array_of<nb::ro>(tensor, self).attr("__dlpack__")(**kwargs);
}

Tensor converted(const Tensor& tensor, const std::string& dtype) {
  const DType wanted = dtype_of(dtype, "dtype");
  const WithoutGil no_gil;
  const Tensor host = to_device(tensor, {});
  const Tensor result = Tensor::empty(tensor.shape(), wanted);
  convert(host, result);
  return to_device(result, tensor.device());
}

nb::object moved(nb::handle self, const std::string& device) {
  const Tensor& tensor = nb::cast<Tensor&>(self);
  const Device wanted = parse_device(device);
  if (tensor.device() == wanted) return nb::borrow(self);
  Tensor result;
  {
    const WithoutGil no_gil;
    result = to_device(tensor, wanted);
  }
  return nb::cast(std::move(result));
}

/// The argument of that name as a Tensor, which keeps it alive.
nb::object as_tensor(nb::handle array, const std::string& name) {
  auto kept = std::make_unique<Kept>();
  const TensorView view = view_of(array, name.c_str(), *kept);
  hold_memory(*kept);
  if (!view) throw Error(name, "None", "an array", Fault::kNull);
  const std::shared_ptr<Kept> owner(kept.release(), [](Kept* objects) {
    const WithGil gil;
    delete objects;
  });
  return object_of(Tensor(view, owner), is_read_only(array));
}

std::vector<std::int64_t> shape_of(const Tensor& tensor) {
  return {tensor.shape().begin(), tensor.shape().end()};
}

}  // namespace

void hold_memory(Kept& kept) {
  for (const auto& [name, object] : kept.objects) {
    if (nb::isinstance<Tensor>(object)) continue;
    const DlExchange* exchange = exchange_of(object);
    if (exchange == nullptr || exchange->managed_from_object == nullptr) {
      throw Error(name, nb::cast<std::string>(nb::str(object.type())),
                  "an array whose memory can be kept by DLPack's interface for C");
    }
    DlManaged* managed = nullptr;
    if (exchange->managed_from_object(object.ptr(), &managed) != 0) throw nb::python_error();
    kept.memory.emplace_back(managed, [](DlManaged* tensor) {
      if (tensor->deleter) tensor->deleter(tensor);
    });
  }
}

TensorView view_of(nb::handle array, const char* name, Kept& kept) {
  return import_view<nb::ndarray<nb::ro>>(array, name, kept);
}

TensorView output_view_of(nb::handle array, const char* name, Kept& kept) {
  if (nb::isinstance<ReadOnlyTensor>(array)) throw Error(name, "read-only", "writable");
  return import_view<nb::ndarray<>>(array, name, kept);
}

Tensor tensor_of(nb::handle array, const char* name, Kept& kept) {
  const TensorView view = view_of(array, name, kept);
  return view ? Tensor(view, nullptr) : Tensor();
}

nb::object item(const nb::dict& dict, const char* key) {
  const nb::handle found = PyDict_GetItemString(dict.ptr(), key);
  return found.is_valid() ? nb::borrow(found) : nb::none();
}

DType dtype_of(const std::string& name, const char* argument) {
  if (const std::optional<DType> dtype = parse_dtype(name)) return *dtype;
  throw Error(argument, name, "a dtype, as \"f32\", \"bf16\", \"e4m3\" or \"u8\"", Fault::kDType);
}

std::optional<Stream> stream_of(std::optional<std::uintptr_t> handle, Device device) {
  if (!handle) return std::nullopt;
  if (device.is_cpu() && !is_openmp_stream(*handle)) {
    throw Error::invalid("stream", "stream is of CUDA: on the cpu it is None", Fault::kDevice);
  }
  return Stream{device, std::bit_cast<void*>(*handle)};
}

Workspace scratch_from(nb::handle function, std::size_t bytes, Device device, Kept& kept) {
  const WithGil gil;
  const nb::object array = function(bytes);
  const TensorView view = output_view_of(array, "workspace", kept);
  if (view && view.device() != device) {
    throw Error("workspace", "on " + to_string(view.device()), "on " + to_string(device),
                Fault::kDevice);
  }
  if (view && !view.contiguous()) {
    throw Error("workspace", "with gaps", "contiguous", Fault::kLayout);
  }
  return {view.data(), static_cast<std::size_t>(view.nbytes())};
}

void bind_tensors(nb::module_& module) {
  nb::class_<Tensor>(
      module, "Tensor",
      "Memory with an element type and a shape, of as_tensor(), empty() and load_file(). Goes to "
      "other packages by DLPack.")
      .def("__dlpack__", &dlpack_of,
           nb::sig("def __dlpack__(self, **kwargs: typing.Any) -> typing_extensions.CapsuleType"))
      .def(
          "__dlpack_device__",
          [](const Tensor& tensor) {
            return nb::make_tuple(tensor.device().is_cpu() ? kDlCpu : kDlCuda,
                                  tensor.device().index);
          },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
      .def_prop_ro(
          "shape", [](const Tensor& tensor) { return nb::tuple(nb::cast(shape_of(tensor))); },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro("dtype", [](const Tensor& tensor) { return std::string(name(tensor.dtype())); })
      .def_prop_ro("device", [](const Tensor& tensor) { return to_string(tensor.device()); })
      .def_prop_ro("nbytes", [](const Tensor& tensor) { return tensor.nbytes(); })
      .def_prop_ro(
          "data_ptr",
          [](const Tensor& tensor) { return reinterpret_cast<std::uintptr_t>(tensor.data()); })
      .def("view", &reinterpreted, nb::arg("dtype"),
           nb::sig("def view(self, dtype: str) -> Tensor"),
           "The same memory with another element type of the same width, as \"e4m3\" for u8.")
      .def("astype", &converted, nb::arg("dtype"), "A copy converted among f64, f32, f16 and bf16.")
      .def("to", &moved, nb::arg("device"), nb::sig("def to(self, device: str) -> Tensor"),
           "The tensor itself if it lies on the device, \"cpu\" or \"cuda:0\", else a copy "
           "there.\n\n"
           "Waits for the default stream. Raises ValueError where the tensor has gaps.")
      .def("__repr__", [](const Tensor& tensor) {
        return "fusedmoe.Tensor(" + std::string(name(tensor.dtype())) + " " +
               to_string(tensor.shape()) + ", " + to_string(tensor.device()) + ")";
      });
  const nb::class_<ReadOnlyTensor, Tensor> read_only(module, "ReadOnlyTensor",
                                                     "A Tensor that no call writes.");
  module.def("as_tensor", &as_tensor, nb::arg("array").none(), nb::arg("name"),
             nb::sig("def as_tensor(array: object, name: str) -> Tensor"));
  module.def(
      "empty",
      [](const std::vector<std::int64_t>& shape, const std::string& dtype,
         const std::string& device) {
        if (shape.size() > Shape::kMaxRank) {
          throw Error("shape", std::to_string(shape.size()) + " dimensions", "at most 6",
                      Fault::kShape);
        }
        return Tensor::empty(Shape(shape), dtype_of(dtype, "dtype"), parse_device(device));
      },
      nb::arg("shape"), nb::arg("dtype"), nb::arg("device"));
  module.def("load_file", [](const std::string& path) {
    const WithoutGil no_gil;
    const SafetensorsFile file = SafetensorsFile::open(path, {FileAccess::kRead});
    std::map<std::string, Tensor> tensors;
    for (const std::string& name : file.names()) tensors[name] = file.tensor(name);
    return tensors;
  });
}

}  // namespace fusedmoe::python
