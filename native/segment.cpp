#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace meshdist {
namespace {

[[noreturn]] void fail(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), what);
}

// A memfd of `bytes` bytes, sealed against resizing, of which the first `reserved` are reserved.
int create_sealed(std::uint64_t bytes, std::uint64_t reserved, const char* name) {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int fd = static_cast<int>(syscall(SYS_memfd_create, name, flags | MFD_NOEXEC_SEAL));
  if (fd < 0 && errno == EINVAL) {  // a kernel before 6.3 does not know the no-exec seal
    fd = static_cast<int>(syscall(SYS_memfd_create, name, flags));
  }
  if (fd < 0) fail(errno, "memfd_create");
  int error = ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  if (error == 0) {
    do {  // not posix_fallocate, which would write to every page where the kernel call is rejected
      error = fallocate(fd, 0, 0, static_cast<off_t>(reserved)) == 0 ? 0 : errno;
    } while (error == EINTR);
    if (error == ENOSPC) error = ENOMEM;
  }
  if (error == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    error = errno;
  }
  if (error != 0) {
    close(fd);
    fail(error, "reserving shared memory");
  }
  return fd;
}

// Allocate all pages of a shared mapping, and map them. Return false if the system has no memory, or is too
// old (before Linux 5.14) to report that: a write would then end the process.
bool populate(void* begin, std::uint64_t bytes) {
  int result;
  do {
    result = madvise(begin, bytes, MADV_POPULATE_WRITE);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

bool can_populate() {
  void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return false;
  const bool could = populate(page, kPage);
  munmap(page, kPage);
  return could;
}

}  // namespace

int create_memory(std::uint64_t bytes) {
  const std::uint64_t lines = (bytes + kCacheLine - 1) / kCacheLine + 1;
  return create_sealed(lines * kCacheLine, lines * kCacheLine, "meshdist-shared");
}

int create_segment(std::uint32_t size, std::uint64_t slot_bytes, std::uint64_t ring_bytes, bool is_crowded) {
  const Geometry geometry = plan_geometry(size, slot_bytes, ring_bytes, is_crowded, can_populate());
  const int fd = create_sealed(geometry.total_bytes, geometry.first_bytes, "meshdist");
  // A new memfd reads as zeros, which is the first state of everything in it.
  if (pwrite(fd, &geometry, sizeof geometry, offsetof(Control, geometry)) !=
      static_cast<ssize_t>(sizeof geometry)) {
    const int error = errno;
    close(fd);
    fail(error, "writing the segment's geometry");
  }
  return fd;
}

Memory::Memory(int fd) {
  struct stat facts;
  if (fstat(fd, &facts) != 0) fail(errno, "fstat");
  const auto total = static_cast<std::uint64_t>(facts.st_size);
  if (total < kCacheLine || total % kCacheLine != 0) {
    throw std::runtime_error("the descriptor holds no memory to share");
  }
  void* address = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (address == MAP_FAILED) fail(errno, "mmap");
  data_ = static_cast<std::uint8_t*>(address);
  bytes_ = total - kCacheLine;
  num_left_ = reinterpret_cast<std::atomic<std::uint32_t>*>(data_ + bytes_);
}

Memory::~Memory() { munmap(data_, bytes_ + kCacheLine); }

Segment::Segment(int fd) {
  struct stat facts;
  if (fstat(fd, &facts) != 0) fail(errno, "fstat");
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) {
    throw std::runtime_error("the descriptor is no sealed memfd");
  }
  Geometry found{};
  if (pread(fd, &found, sizeof found, 0) != static_cast<ssize_t>(sizeof found)) {
    throw std::runtime_error("the descriptor holds no segment");
  }
  if (found.magic != kMagic || found.version != kVersion) {
    throw std::runtime_error("the segment is of another version of the core");
  }
  // The sizes are taken from our own arithmetic, so that a wrong segment cannot lead outside.
  const Geometry ours =
      plan_geometry(found.size, found.slot_bytes, found.ring_bytes, found.is_crowded != 0, found.grows != 0);
  if (std::memcmp(&ours, &found, sizeof ours) != 0 ||
      static_cast<std::uint64_t>(facts.st_size) != ours.total_bytes) {
    throw std::runtime_error("the segment's geometry contradicts itself");
  }
  const int populates = ours.grows ? 0 : MAP_POPULATE;
  void* address = mmap(nullptr, ours.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | populates, fd, 0);
  if (address == MAP_FAILED) fail(errno, "mmap");
  base_ = static_cast<std::uint8_t*>(address);
  geometry_ = ours;
  if (ours.grows) populate(base_, ours.first_bytes);  // they are reserved: this only maps them
}

bool Segment::reserve(std::uint64_t at, std::uint64_t bytes) const { return populate(base_ + at, bytes); }

Segment::~Segment() { munmap(base_, geometry_.total_bytes); }

}  // namespace meshdist
