// Messages between the ranks of a communicator.
//
// They travel through sockets whose names are no files, so that nothing is left of a process that is killed. A
// message to a rank that has died is lost, and one from a rank that never comes is waited for until `abort`: a GPU
// would wait, too.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace pretended {

// What messages are about. Those on one channel between two ranks arrive in the order in which they were posted.
enum class Channel : int { kMeeting, kCollective, kSendRecv };

struct Message {
    std::string title;
    std::vector<char> bytes;
};

class Mailbox {
 public:
    Mailbox(std::string name, int rank, int size);

    // Returns when the message is on its way, whether or not the peer waits for it.
    void post(Channel channel, int peer, const std::string& title, const char* bytes, size_t size);

    // The next message of a peer. False: aborted.
    bool take(Channel channel, int peer, Message* message);

    // Ends every wait, now and later.
    void abort();
    void wait_for_abort();

    // Frees the sockets and the thread. Called once, when no other call runs, or after `abort`.
    void close();

 private:
    int connection(int peer);
    void receive();
    bool receive_one(int connection);

    const std::string name_;
    const int rank_;
    int listening_ = -1, waking_ = -1;
    std::atomic<bool> aborted_{false};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::pair<Channel, int>, std::deque<Message>> arrived_;
    std::mutex posting_;
    std::vector<int> connections_;  // to each peer; -1 before the first message
    std::thread receiver_;
};

}  // namespace pretended
