#include "gpu/host_page.h"

#include "base/error.h"
#include "gpu/driver.h"

namespace unicron::gpu {

HostPage::~HostPage() {
  if (on_device_ == 0) return;
  try {
    const ScopedDevice current(device_);
    driver().unregister_host(data_);
  } catch (const Error&) {
    // The device failed: the registration goes with the process.
  }
}

void HostPage::write_on_stream(const void* word, uint64_t value, int device, Stream stream) {
  const auto offset = static_cast<uint64_t>(static_cast<const char*>(word) - static_cast<const char*>(data_));
  if (offset > nbytes_ - sizeof(uint64_t)) {
    throw Error(ErrorCode::kInvalidArgument, "a word outside of the page that a GPU writes into");
  }
  const ScopedDevice current(device);
  if (on_device_ == 0) {
    check(driver().register_host(data_, nbytes_, kHostRegisterPortable | kHostRegisterDeviceMap),
          "registering a page for the GPU to write into");
    check(driver().host_address(&on_device_, data_, 0), "addressing a page for the GPU to write into");
    device_ = device;
  }
  check(driver().write_value(stream, on_device_ + offset, value, 0), "writing a word in the order of a stream");
}

}  // namespace unicron::gpu
