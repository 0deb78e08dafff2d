// See mailbox.h. One connection for each direction between two ranks, made with the first message; one thread
// receives.
#include "mailbox.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace pretended {
namespace {

struct Header {
    int from;
    Channel channel;
    uint64_t title_size, size;
};

// In the abstract namespace of Linux: gone with the last process that holds it open.
socklen_t address_of(const std::string& name, int rank, sockaddr_un* address) {
    const std::string full = name + "." + std::to_string(rank);
    *address = {};
    address->sun_family = AF_UNIX;
    if (full.size() + 1 > sizeof address->sun_path) abort();
    memcpy(address->sun_path + 1, full.data(), full.size());
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + full.size());
}

bool write_all(int connection, const void* from, size_t size) {
    const auto* at = static_cast<const char*>(from);
    while (size) {
        const auto written = send(connection, at, size, MSG_NOSIGNAL);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        at += written;
        size -= static_cast<size_t>(written);
    }
    return true;
}

bool read_all(int connection, void* to, size_t size) {
    auto* at = static_cast<char*>(to);
    while (size) {
        const auto got = recv(connection, at, size, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += got;
        size -= static_cast<size_t>(got);
    }
    return true;
}

}  // namespace

Mailbox::Mailbox(std::string name, int rank, int size) : name_(std::move(name)), rank_(rank), connections_(size, -1) {
    sockaddr_un address;
    const auto length = address_of(name_, rank, &address);
    listening_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    waking_ = eventfd(0, EFD_CLOEXEC);
    if (bind(listening_, reinterpret_cast<sockaddr*>(&address), length) || listen(listening_, size)) {
        perror("pretended NCCL: a rank cannot listen");
        std::abort();
    }
    receiver_ = std::thread([this] { receive(); });
}

int Mailbox::connection(int peer) {
    sockaddr_un address;
    const auto length = address_of(name_, peer, &address);
    while (!aborted_ && connections_[peer] < 0) {
        const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (!connect(made, reinterpret_cast<sockaddr*>(&address), length)) {
            connections_[peer] = made;
        } else {
            ::close(made);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the peer is not here yet
        }
    }
    return connections_[peer];
}

void Mailbox::post(Channel channel, int peer, const std::string& title, const char* bytes, size_t size) {
    if (peer == rank_) {
        std::lock_guard<std::mutex> lock(mutex_);
        arrived_[{channel, peer}].push_back({title, {bytes, bytes + size}});
        changed_.notify_all();
        return;
    }
    std::lock_guard<std::mutex> lock(posting_);
    const int to = connection(peer);
    const Header header{rank_, channel, title.size(), size};
    if (to >= 0 && write_all(to, &header, sizeof header) && write_all(to, title.data(), title.size())) {
        write_all(to, bytes, size);
    }
}

bool Mailbox::take(Channel channel, int peer, Message* message) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& messages = arrived_[{channel, peer}];
    changed_.wait(lock, [&] { return aborted_ || !messages.empty(); });
    if (aborted_) return false;
    *message = std::move(messages.front());
    messages.pop_front();
    return true;
}

void Mailbox::receive() {
    std::vector<pollfd> polled{{waking_, POLLIN, 0}, {listening_, POLLIN, 0}};
    while (!aborted_) {
        if (poll(polled.data(), polled.size(), -1) < 0) continue;
        if (polled[0].revents) break;
        std::vector<pollfd> kept{polled[0], polled[1]};
        for (size_t i = 2; i < polled.size(); i++) {
            if (!polled[i].revents || receive_one(polled[i].fd)) {
                kept.push_back(polled[i]);
            } else {
                ::close(polled[i].fd);
            }
        }
        if (polled[1].revents) kept.push_back({accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC), POLLIN, 0});
        polled = std::move(kept);
    }
    for (size_t i = 2; i < polled.size(); i++) ::close(polled[i].fd);
}

bool Mailbox::receive_one(int connection) {
    Header header;
    Message message;
    if (!read_all(connection, &header, sizeof header)) return false;
    message.title.resize(header.title_size);
    message.bytes.resize(header.size);
    if (!read_all(connection, message.title.data(), header.title_size)) return false;
    if (!read_all(connection, message.bytes.data(), header.size)) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    arrived_[{header.channel, header.from}].push_back(std::move(message));
    changed_.notify_all();
    return true;
}

void Mailbox::abort() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        aborted_ = true;
    }
    changed_.notify_all();
    for (int connection : connections_) {
        if (connection >= 0) shutdown(connection, SHUT_RDWR);  // ends a write to a peer that does not read
    }
}

void Mailbox::wait_for_abort() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return aborted_.load(); });
}

void Mailbox::close() {
    eventfd_write(waking_, 1);
    receiver_.join();
    std::lock_guard<std::mutex> lock(posting_);
    for (int& connection : connections_) {
        if (connection >= 0) ::close(connection);
        connection = -1;
    }
    ::close(listening_);
    ::close(waking_);
}

}  // namespace pretended
