// A data plane whose ranks connect when messages are first needed: GPUs of one host, which read
// each other's memory, may never need any.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "fusedmoe/comm.h"

namespace fusedmoe::comm {

class LaterData final : public DataPlane {
 public:
  /// `make` connects the ranks. If it throws, every later connect() throws the same.
  using Make = std::function<std::shared_ptr<DataPlane>()>;
  LaterData(std::string name, Device device, Make make)
      : name_(std::move(name)), device_(device), make_(std::move(make)) {}

  std::string_view name() const override { return name_; }
  Device device() const override { return device_; }
  void connect() override;
  void exchange(std::span<const Message> sends, std::span<const Message> receives, Stream stream,
                Waiting& waiting) override;
  bool is_byte_stream() const override { return made_ && made_->is_byte_stream(); }
  bool has_collectives() const override { return made_ && made_->has_collectives(); }
  void all_gather(std::span<const Gather> buffers, Stream stream, Waiting& waiting) override;
  void reduce_scatter(const void* data, void* out, std::int64_t count, DType dtype, Stream stream,
                      Waiting& waiting) override;
  void abort() noexcept override;

 private:
  const std::string name_;
  const Device device_;
  const Make make_;
  std::mutex mutex_;  // between connect() and abort(), which any thread may call
  bool is_aborted_ = false;
  std::shared_ptr<DataPlane> made_;
  std::exception_ptr failure_;
};

}  // namespace fusedmoe::comm
