#include "runtime/process.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "runtime/check.h"

namespace pk {
namespace {

constexpr int kExchangeTimeoutMs = 60'000;

[[noreturn]] void fail(const std::string& what) { throw Error(what + ": " + std::strerror(errno)); }

template <typename T>
T random_value() {
  T value;
  if (getrandom(&value, sizeof value, 0) != sizeof value) fail("getrandom");
  return value;
}

class Socket {
 public:
  Socket() : fd_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    if (fd_ < 0) fail("socket");
  }
  explicit Socket(int fd) : fd_(fd) {}
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }

 private:
  int fd_;
};

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

void send_descriptor(const Rendezvous& to, int32_t sender, int descriptor) {
  Socket socket;
  socklen_t length;
  const sockaddr_un address = abstract_address(to, &length);
  if (connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0)
    fail("connect to a peer process");
  Message message{{to.secret[0], to.secret[1]}, sender};
  iovec data{&message, sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  cmsghdr* rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(rights), &descriptor, sizeof(int));
  if (sendmsg(socket.fd(), &header, MSG_NOSIGNAL) != sizeof message)
    fail("send a descriptor to a peer process");
}

// One accepted connection: the sender and its descriptor, or sender -1 for a stranger.
std::pair<int, int> receive_descriptor(int connection, const Rendezvous& mine) {
  ucred sender{};
  socklen_t size = sizeof sender;
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &sender, &size) != 0 ||
      sender.uid != geteuid())
    return {-1, -1};
  pollfd waiting{connection, POLLIN, 0};
  if (poll(&waiting, 1, kExchangeTimeoutMs) != 1) return {-1, -1};
  Message message{};
  iovec data{&message, sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  const ssize_t got = recvmsg(connection, &header, MSG_CMSG_CLOEXEC);
  const cmsghdr* rights = CMSG_FIRSTHDR(&header);
  int descriptor = -1;
  if (rights && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS &&
      rights->cmsg_len == CMSG_LEN(sizeof(int))) {
    std::memcpy(&descriptor, CMSG_DATA(rights), sizeof(int));
  }
  const bool known =
      got == sizeof message && std::memcmp(message.secret, mine.secret, sizeof mine.secret) == 0;
  if (known && descriptor >= 0) return {message.sender, descriptor};
  if (descriptor >= 0) close(descriptor);
  return {-1, -1};
}

}  // namespace

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

std::vector<int> exchange_descriptors(Exchange& exchange, const std::vector<Placement>& placements,
                                      int descriptor) {
  const int num_ranks = exchange.num_ranks();
  const int rank = exchange.rank();
  const Rendezvous mine = random_value<Rendezvous>();
  Socket listener;
  socklen_t length;
  const sockaddr_un address = abstract_address(mine, &length);
  if (bind(listener.fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0) fail("bind");
  if (listen(listener.fd(), num_ranks) != 0) fail("listen");
  const std::vector<Rendezvous> all = exchange.all_gather(mine);
  int expected = 0;
  for (int peer = 0; peer < num_ranks; ++peer) {
    if (placements[peer].process == placements[rank].process) continue;
    // The listener's backlog takes the message whether or not the peer accepts yet: no order of
    // ranks can block.
    send_descriptor(all[peer], rank, descriptor);
    ++expected;
  }
  std::vector<int> received(num_ranks, -1);
  try {
    while (expected > 0) {
      pollfd waiting{listener.fd(), POLLIN, 0};
      if (poll(&waiting, 1, kExchangeTimeoutMs) != 1)
        throw Error("a peer process did not hand over its memory in time");
      Socket connection(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
      if (connection.fd() < 0) fail("accept");
      const auto [sender, given] = receive_descriptor(connection.fd(), mine);
      if (sender < 0) continue;  // a stranger: not of this job
      if (sender >= num_ranks || received[sender] >= 0) {
        close(given);
        throw Error("two descriptors from rank " + std::to_string(sender));
      }
      received[sender] = given;
      --expected;
    }
  } catch (...) {
    for (int fd : received) {
      if (fd >= 0) close(fd);
    }
    throw;
  }
  return received;
}

}  // namespace pk
