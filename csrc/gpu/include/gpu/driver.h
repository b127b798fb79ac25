// The CUDA driver of this machine, if there is one, and the few objects of it that unicron owns.
#pragma once

#include <cstdint>
#include <string>

#include "base/ids.h"
#include "base/time.h"
#include "gpu/driver_api.h"

namespace unicron::gpu {

constexpr int kDevicesMax = 64;

// Loads and initialises the driver, once. Null where there is none; why_no_driver() then says what is missing. Not to
// be called in a process that is to be forked: a driver does not survive a fork.
const DriverApi* find_driver();
std::string why_no_driver();
// Throws Error(kNoDevice) where there is none.
const DriverApi& driver();

int num_devices();     // 0 without a driver
int driver_version();  // 13000 for CUDA 13.0; 0 without a driver
std::string device_name(int device);
int device_attribute(int device, int attribute);
uint64_t device_memory_bytes(int device);
// What the context of this process reserves of GPU memory for each thread's stack: so many bytes for every thread that
// the device can run at once, 264 MiB in all on an H200 at the usual 1024. Returns what it was.
size_t set_stack_bytes(int device, size_t nbytes);

// Throws Error(kDevice) "<what>: <name of the error> (<its meaning>)" unless `result` is a success.
void check(Result result, const std::string& what);

// The device's primary context (the one torch uses) is current while this object lives.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device);
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;
  ~ScopedDevice();
};

// Of the device that is current. Destroyed without a check: at that point nobody can act on an error.
class OwnedStream {
 public:
  OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  ~OwnedStream();
  Stream get() const { return stream_; }

 private:
  Stream stream_ = nullptr;
};

class OwnedEvent {
 public:
  OwnedEvent();
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;
  ~OwnedEvent();
  Event get() const { return event_; }
  void record(Stream stream) { check(driver().record_event(event_, stream), "recording an event"); }
  // Throws Error(kTimeout) when it has not happened by then, Error(kDevice) when the device failed before it.
  void wait(Deadline deadline, const std::string& what) const;

 private:
  Event event_ = nullptr;
};

// Device memory of a few words, zeroed in the order of a stream.
class DeviceWords {
 public:
  DeviceWords(size_t num_words, Stream stream);
  DeviceWords(const DeviceWords&) = delete;
  DeviceWords& operator=(const DeviceWords&) = delete;
  ~DeviceWords();
  DevicePointer address() const { return address_; }
  // The first word. Only when all that writes it has ended: this waits without a bound for one small copy.
  uint64_t read(Stream stream) const;

 private:
  DevicePointer address_ = 0;
};

}  // namespace unicron::gpu
