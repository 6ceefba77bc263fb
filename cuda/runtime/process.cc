#include "runtime/process.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <utility>

#include "runtime/check.h"
#include "runtime/time_limit.h"

namespace pk {
namespace {

[[noreturn]] void fail(const std::string& what) { throw Error(what + ": " + std::strerror(errno)); }

template <typename T>
T random_value() {
  T value;
  if (getrandom(&value, sizeof value, 0) != sizeof value) fail("getrandom");
  return value;
}

// Calls again what a signal interrupted: Python programs have signal handlers.
template <typename Call>
auto restarted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

Descriptor open_socket() {
  Descriptor fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) fail("socket");
  return fd;
}

// Waits for something to read until `deadline`.
bool readable(int fd, std::chrono::steady_clock::time_point deadline) {
  const auto left = deadline - std::chrono::steady_clock::now();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(left).count();
  pollfd waiting{fd, POLLIN, 0};
  const int limit = static_cast<int>(std::clamp<int64_t>(ms, 0, 1 << 30));
  return restarted([&] { return poll(&waiting, 1, limit); }) == 1;
}

bool same_user(int connection) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         peer.uid == geteuid();
}

struct Rendezvous {
  uint64_t name[2];
  uint64_t secret[2];
};

struct Message {
  uint64_t secret[2];  // the receiver's: proves that the sender took part in the exchange
  int32_t sender;
};

sockaddr_un abstract_address(const Rendezvous& rendezvous, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // sun_path[0] == 0: the abstract namespace, nothing in any file system.
  const int written =
      std::snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "pk_jax-%016llx%016llx",
                    static_cast<unsigned long long>(rendezvous.name[0]),
                    static_cast<unsigned long long>(rendezvous.name[1]));
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + written);
  return address;
}

// A message with room for one descriptor beside it, laid out as sendmsg and recvmsg want it.
class Envelope {
 public:
  explicit Envelope(Message* message) : data_{message, sizeof *message} {
    header_.msg_iov = &data_;
    header_.msg_iovlen = 1;
    header_.msg_control = control_;
    header_.msg_controllen = CMSG_LEN(sizeof(int));  // no room for a second descriptor
  }
  msghdr* header() { return &header_; }

  void enclose(int descriptor) {
    cmsghdr* rights = CMSG_FIRSTHDR(&header_);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &descriptor, sizeof(int));
  }
  Descriptor enclosed() {
    const cmsghdr* rights = CMSG_FIRSTHDR(&header_);
    if (!rights || rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS ||
        rights->cmsg_len != CMSG_LEN(sizeof(int))) {
      return Descriptor();
    }
    int fd;
    std::memcpy(&fd, CMSG_DATA(rights), sizeof(int));
    return Descriptor(fd);
  }

 private:
  iovec data_;
  alignas(cmsghdr) char control_[CMSG_SPACE(sizeof(int))] = {};
  msghdr header_{};
};

void send_descriptor(const Rendezvous& to, int32_t sender, int descriptor) {
  const Descriptor socket = open_socket();
  // connect() waits while the peer's backlog is full, which strangers could fill.
  const timeval limit{10, 0};
  setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  socklen_t length;
  const sockaddr_un address = abstract_address(to, &length);
  if (restarted([&] {
        return connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length);
      }) != 0) {
    fail("connect to a peer process");
  }
  if (!same_user(socket.get())) throw Error("the socket of a peer process belongs to another user");
  Message message{{to.secret[0], to.secret[1]}, sender};
  Envelope envelope(&message);
  envelope.enclose(descriptor);
  if (restarted([&] { return sendmsg(socket.get(), envelope.header(), MSG_NOSIGNAL); }) !=
      sizeof message) {
    fail("send a descriptor to a peer process");
  }
}

// One accepted connection: the sender and its descriptor, or sender -1 for a stranger.
std::pair<int, Descriptor> receive_descriptor(int connection, const Rendezvous& mine) {
  // A peer has sent before it is accepted, or sends at once; who keeps silent is a stranger.
  const auto soon = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  if (!same_user(connection) || !readable(connection, soon)) return {-1, Descriptor()};
  Message message{};
  Envelope envelope(&message);
  const ssize_t got =
      restarted([&] { return recvmsg(connection, envelope.header(), MSG_CMSG_CLOEXEC); });
  Descriptor descriptor = envelope.enclosed();
  const bool known =
      got == sizeof message && std::memcmp(message.secret, mine.secret, sizeof mine.secret) == 0;
  if (known && descriptor) return {message.sender, std::move(descriptor)};
  return {-1, Descriptor()};
}

// Takes descriptors until there is one of every rank in another process.
std::vector<Descriptor> receive_all(const Descriptor& listener, const Rendezvous& mine,
                                    int num_ranks, int expected) {
  std::vector<Descriptor> received(num_ranks);
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::nanoseconds(time_limit_ns());
  while (expected > 0) {
    if (!readable(listener.get(), deadline)) {
      throw Error("a peer process did not hand over its memory in time");
    }
    const Descriptor connection(
        restarted([&] { return accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC); }));
    if (!connection) fail("accept");
    auto [sender, descriptor] = receive_descriptor(connection.get(), mine);
    if (sender < 0) continue;  // a stranger: not of this job
    if (sender >= num_ranks || received[sender]) {
      throw Error("two descriptors from rank " + std::to_string(sender));
    }
    received[sender] = std::move(descriptor);
    --expected;
  }
  return received;
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

std::string host_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network{};
  if (boot.empty() || stat("/proc/self/ns/net", &network) != 0)
    throw Error("cannot tell which host this is (/proc)");
  return boot + "/" + std::to_string(network.st_ino);
}

uint64_t process_id() {
  static const uint64_t id = random_value<uint64_t>();
  return id;
}

std::vector<Descriptor> exchange_descriptors(Exchange& exchange,
                                             const std::vector<Placement>& placements,
                                             const Descriptor& mine) {
  const int num_ranks = exchange.num_ranks();
  const int rank = exchange.rank();
  Rendezvous here{};
  Descriptor listener;
  exchange.together("opening a socket for the peers", [&] {
    here = random_value<Rendezvous>();
    listener = open_socket();
    socklen_t length;
    const sockaddr_un address = abstract_address(here, &length);
    if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0)
      fail("bind");
    if (listen(listener.get(), num_ranks) != 0) fail("listen");
  });
  const std::vector<Rendezvous> all = exchange.all_gather(here);
  int expected = 0;
  exchange.together("handing memory to the peers", [&] {
    for (int peer = 0; peer < num_ranks; ++peer) {
      if (placements[peer].process == placements[rank].process) continue;
      // The listener's backlog takes the message before the peer accepts: no order of ranks can
      // block.
      send_descriptor(all[peer], rank, mine.get());
      ++expected;
    }
  });
  std::vector<Descriptor> received;
  exchange.together("taking memory from the peers",
                    [&] { received = receive_all(listener, here, num_ranks, expected); });
  return received;
}

}  // namespace pk
