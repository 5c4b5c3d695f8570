#include "transfers.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "kernels.h"
#include "reach.h"

namespace meshdist {

Transfers::Transfers(std::shared_ptr<Endpoint> endpoint) : end_(std::move(endpoint)), peers_(end_->size) {
  const Segment& segment = end_->segment;
  for (unsigned j = 0; j < end_->size; ++j) {
    if (j == end_->rank) continue;
    peers_[j].in = {segment.first_ring(j, end_->rank), segment.geometry().first_ring_bytes, 0};
    peers_[j].out = {segment.first_ring(end_->rank, j), segment.geometry().first_ring_bytes, 0};
    peers_[j].may_grow = segment.geometry().grows != 0;
  }
}

// A message of up to an eighth of the ring goes at once: it costs one copy more than needed only
// where no receive waits for it.
std::uint64_t Transfers::message_limit(unsigned peer) const {
  const std::size_t most = end_->is_crowded ? tuning.crowded_message_bytes : tuning.message_bytes;
  return std::min<std::uint64_t>(most, peers_[peer].out.bytes / 8);
}

// Pieces of a quarter keep both ends of a ring busy.
std::uint64_t Transfers::piece_limit(unsigned peer) const {
  return std::min<std::uint64_t>(64 * 1024, peers_[peer].out.bytes / 4 - sizeof(Packet));
}

bool Transfers::starts_at_once(const Transfer& transfer) const {
  return transfer.bytes <= tuning.begun_most_bytes &&
         std::unique_lock<std::mutex>(mutex_, std::try_to_lock).owns_lock();
}

void Transfers::start(const TransferPtr& transfer, bool in_background) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (end_->is_over()) {
    transfer->status = end_->over_status();
    transfer->is_done.store(true);
    return;
  }
  ++pending_;
  if (!transfer->is_send) {
    post(transfer);
  } else if (transfer->peer == static_cast<int>(end_->rank)) {
    send_to_self(transfer);
  } else {
    peers_[transfer->peer].unannounced.push_back(transfer);
    push(transfer->peer);
  }
  if ((in_background && !transfer->is_done.load()) || num_owed_ > 0) leave_to_helper(lock);
}

// Let the helper advance the transfers in flight when this thread no longer does.
void Transfers::leave_to_helper(std::unique_lock<std::mutex>& lock) {
  if (!has_helper_) {
    has_helper_ = true;
    // The thread owns its data, so that no other thread has to wait for its end.
    std::thread([self = shared_from_this()] { self->help(); }).detach();
  }
  lock.unlock();
  idle_.notify_all();
}

bool Transfers::test(const TransferPtr& transfer) {
  if (transfer->is_done.load(std::memory_order_acquire)) return true;
  if (end_->is_forked()) return false;  // transfers in flight belong to the parent
  std::lock_guard<std::mutex> lock(mutex_);
  advance();
  if (!transfer->is_done.load() && end_->is_over()) give_up(transfer, end_->over_status());
  return transfer->is_done.load();
}

bool Transfers::is_done_soon(const Transfer& transfer) {
  for (unsigned i = 0; i < 2 * kLooks && !transfer.is_done.load(std::memory_order_acquire); i += end_->size) {
    if (end_->is_crowded) return false;
    pause_core();
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) advance();
  }
  return transfer.is_done.load(std::memory_order_acquire);
}

Status Transfers::wait(const TransferPtr& transfer, Nanoseconds deadline, Interruption interruption) {
  if (transfer->is_done.load(std::memory_order_acquire)) return transfer->status;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++foreground_;
  }
  const auto done = [&] { return transfer->is_done.load(std::memory_order_acquire); };
  const auto ready = [&] {
    if (mutex_.try_lock()) {
      advance();
      mutex_.unlock();
    }
    return done();
  };
  // Before it sleeps a thread must look itself, whichever other one holds the lock.
  const auto has_progress = [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool moved = advance();
    return moved || done();
  };
  const auto is_over = [&] { return end_->is_over(); };
  while (!look(end_->patience, ready, is_over)) {
    Status status = Status::ok;
    const Nanoseconds left = left_until(deadline);
    if (left <= 0) {
      status = Status::timeout;
    } else if (interruption != nullptr && interruption()) {
      status = Status::interrupted;
    } else if (is_hopeless(*transfer)) {
      status = Status::died;
    }
    if (status != Status::ok) {
      std::lock_guard<std::mutex> lock(mutex_);
      advance();  // data that a member wrote before its end still count
      give_up(transfer, status);
      break;
    }
    doze(end_->me().seats[kForTransfers], kAnyone, std::min(left, kSlice), has_progress, is_over);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  --foreground_;
  if (!done()) give_up(transfer, end_->over_status());
  const bool is_last = foreground_ == 0;
  if (is_last && ((pending_ > 0 && has_helper_) || num_owed_ > 0)) leave_to_helper(lock);
  return transfer->status;
}

void Transfers::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  give_up_all(Status::closed);
  idle_.notify_all();
}

void Transfers::help() {
  block_signals();
  const auto is_over = [&] { return end_->is_over(); };
  const auto has_progress = [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    return advance() || !has_work() || foreground_ > 0;
  };
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      idle_.wait(lock, [&] { return is_over() || (has_work() && foreground_ == 0); });
      if (is_over()) {
        give_up_all(end_->over_status());
        return;
      }
      for (const TransferPtr& transfer : all_pending()) {
        if (is_hopeless(*transfer)) {
          advance();
          give_up(transfer, Status::died);
        }
      }
      for (unsigned j = 0; j < end_->size; ++j) {
        if (peers_[j].replies.empty() || !end_->is_gone(j)) continue;
        num_owed_ -= static_cast<int>(peers_[j].replies.size());
        peers_[j].replies.clear();
      }
    }
    doze(end_->me().seats[kForTransfers], kAnyone, kSlice, has_progress, is_over);
  }
}

// Whether no member can still do the other half; or, for a receive from any member, whether a possible sender
// has died.
bool Transfers::is_hopeless(const Transfer& transfer) const {
  if (transfer.peer == static_cast<int>(end_->rank)) return false;
  if (transfer.peer >= 0) return end_->is_gone(transfer.peer);
  if (transfer.source >= 0) return end_->is_gone(transfer.source);
  if (end_->size == 1) return false;
  bool is_anyone_left = false;
  for (unsigned j = 0; j < end_->size; ++j) {
    if (j == end_->rank) continue;
    if (end_->has_died(j)) return true;
    is_anyone_left |= !end_->is_gone(j);
  }
  return !is_anyone_left;
}

std::vector<TransferPtr> Transfers::all_pending() const {
  std::vector<TransferPtr> all(posted_.begin(), posted_.end());
  for (const Peer& peer : peers_) {
    all.insert(all.end(), peer.unannounced.begin(), peer.unannounced.end());
    for (const auto& one : peer.streaming) all.push_back(one.second);
    for (const auto& one : peer.offered) all.push_back(one.second);
    for (const auto& one : peer.arriving) {
      if (one.second.receive != nullptr) all.push_back(one.second.receive);
    }
    for (const Early& early : peer.early) {
      if (early.own != nullptr) all.push_back(early.own);
    }
  }
  return all;
}

void Transfers::give_up_all(Status status) {
  for (const TransferPtr& transfer : all_pending()) give_up(transfer, status);
}

void Transfers::complete(const TransferPtr& transfer, Status status) {
  if (transfer->is_done.load()) return;
  transfer->status = status;
  transfer->is_done.store(true, std::memory_order_seq_cst);
  --pending_;
  Seat& seat = end_->me().seats[kForTransfers];  // other threads of this member
  if (seat.sleepers.load(std::memory_order_seq_cst) != 0) ring(seat);
}

void Transfers::give_up(const TransferPtr& transfer, Status status) {
  if (transfer->is_done.load()) return;
  if (!transfer->is_send) {
    posted_.remove(transfer);
    for (Peer& peer : peers_) {
      for (auto& one : peer.arriving) {
        if (one.second.receive == transfer) one.second.receive = nullptr;
      }
    }
  } else {
    Peer& peer = peers_[transfer->peer];
    peer.unannounced.erase(std::remove(peer.unannounced.begin(), peer.unannounced.end(), transfer),
                           peer.unannounced.end());
    // Taken back now where the receiver knows of it: this member may not look again.
    const auto take_back = [&](auto& sends) {
      for (auto one = sends.begin(); one != sends.end();) {
        if (one->second != transfer) {
          ++one;
          continue;
        }
        Packet cancel{};
        cancel.kind = Kind::cancel;
        cancel.id = one->first;
        end_->segment.device_group(end_->rank, transfer->peer).revocations.fetch_add(1);
        owe(peer, cancel);
        one = sends.erase(one);
      }
    };
    take_back(peer.offered);
    take_back(peer.streaming);
    peer.early.remove_if([&](const Early& early) { return early.own == transfer; });
    if (transfer->peer != static_cast<int>(end_->rank)) push(transfer->peer);
  }
  complete(transfer, status);
}

// ---- matching

bool Transfers::fits(const TransferPtr& receive, unsigned from, const Packet& packet) {
  receive->source = static_cast<int>(from);
  receive->other_note = packet.note;
  return receive->dtype == packet.dtype && receive->count == packet.count && receive->bytes == packet.bytes;
}

TransferPtr Transfers::match(unsigned from, std::int64_t tag) {
  for (auto one = posted_.begin(); one != posted_.end(); ++one) {
    const Transfer& receive = **one;
    if (receive.tag == tag && (receive.peer < 0 || receive.peer == static_cast<int>(from))) {
      TransferPtr found = *one;
      posted_.erase(one);
      return found;
    }
  }
  return nullptr;
}

void Transfers::accept(const TransferPtr& receive, unsigned from, const Packet& packet) {
  Packet reply{};
  reply.id = packet.id;
  if (fits(receive, from, packet)) {
    const bool is_fetched = fetch(receive, from, packet);
    reply.kind = is_fetched ? Kind::fetched : Kind::accept;
    if (is_fetched) {
      complete(receive, Status::ok);
    } else {
      peers_[from].arriving[packet.id] = Arriving{receive, packet.bytes};
    }
  } else {
    reply.kind = Kind::reject;
    reply.note = receive->note;
    complete(receive, Status::mismatch);
  }
  owe(peers_[from], reply);
  push(from);
}

// Read an offered message where it lies; whether that could be done.
bool Transfers::fetch(const TransferPtr& receive, unsigned from, const Packet& packet) {
  if (packet.place == nullptr) return false;
  std::optional<bool>& is_readable = peers_[from].is_readable;
  if (!is_readable) is_readable = can_read(*end_, from);
  if (!*is_readable) return false;
  const bool is_read = read_from(*end_, from, receive->data, packet.place, packet.bytes);
  // If the sender has revoked an offer before all was read, it may have been this offer.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const auto& revocations = end_->segment.device_group(from, end_->rank).revocations;
  const bool is_valid = revocations.load() == packet.revocations;
  if (!is_read && is_valid) is_readable = false;
  return is_read && is_valid;
}

void Transfers::post(const TransferPtr& receive) {
  // Take the messages that have arrived first, so that they keep their order.
  for (unsigned j = 0; j < end_->size; ++j) {
    if (j != end_->rank && (receive->peer < 0 || receive->peer == static_cast<int>(j))) drain(j);
  }
  const auto fits_tag = [&](const Early& one) { return one.packet.tag == receive->tag; };
  std::list<Early>::iterator found;
  unsigned from = end_->size;
  for (unsigned j = 0; j < end_->size; ++j) {
    if (receive->peer >= 0 && receive->peer != static_cast<int>(j)) continue;
    const auto first = std::find_if(peers_[j].early.begin(), peers_[j].early.end(), fits_tag);
    if (first == peers_[j].early.end() || (from < end_->size && found->order < first->order)) continue;
    found = first;
    from = j;
  }
  if (from == end_->size) {
    posted_.push_back(receive);
    return;
  }
  Early early = std::move(*found);
  peers_[from].early.erase(found);
  if (early.own != nullptr) {
    pass_to_self(early.own, receive, early.packet);
  } else {
    meet(receive, from, early.packet, early.payload.data());
  }
}

// Let a receive take what came for it: a message, an offer, or word that an offer was taken back.
void Transfers::meet(const TransferPtr& receive, unsigned from, const Packet& packet,
                     const std::uint8_t* payload) {
  if (packet.kind == Kind::offer) {
    accept(receive, from, packet);
  } else if (packet.kind == Kind::cancel) {
    receive->source = static_cast<int>(from);
    complete(receive, Status::cancelled);
  } else if (!fits(receive, from, packet)) {
    complete(receive, Status::mismatch);
  } else {
    if (packet.bytes != 0) std::memcpy(receive->data, payload, packet.bytes);
    complete(receive, Status::ok);
  }
}

Transfers::Packet Transfers::packet_of(const Transfer& send) const {
  Packet packet{};
  packet.tag = send.tag;
  packet.id = next_id_;
  packet.bytes = send.bytes;
  packet.count = send.count;
  packet.dtype = send.dtype;
  packet.note = send.note;
  return packet;
}

void Transfers::send_to_self(const TransferPtr& send) {
  const Packet packet = packet_of(*send);
  const TransferPtr receive = match(end_->rank, send->tag);
  if (receive == nullptr) {
    peers_[end_->rank].early.push_back(Early{packet, next_order_++, {}, send});
  } else {
    pass_to_self(send, receive, packet);
  }
}

void Transfers::pass_to_self(const TransferPtr& send, const TransferPtr& receive, const Packet& packet) {
  const Status status = fits(receive, end_->rank, packet) ? Status::ok : Status::mismatch;
  if (status == Status::ok) copy_bytes(receive->data, send->data, send->bytes, false);
  send->other_note = receive->note;
  complete(receive, status);
  complete(send, status);
}

// ---- the rings

bool Transfers::advance() {
  bool moved = false;
  for (unsigned j = 0; j < end_->size; ++j) {
    if (j == end_->rank) continue;
    moved |= drain(j);
    moved |= push(j);
  }
  return moved;
}

bool Transfers::drain(unsigned peer) {
  DeviceGroup& device_group = end_->segment.device_group(peer, end_->rank);
  Ring& ring = peers_[peer].in;
  std::uint64_t at = device_group.read.load(std::memory_order_relaxed);
  bool moved = false;
  while (at < device_group.written.load(std::memory_order_seq_cst)) {
    const std::uint8_t* where = ring.at(at);
    Packet packet;
    std::memcpy(&packet, where, sizeof packet);
    take(peer, packet, where + sizeof packet);
    at += sizeof packet + round_up(packet.payload, sizeof packet);
    if (packet.kind == Kind::grow) {
      ring = {end_->segment.ring(peer, end_->rank), end_->segment.geometry().ring_bytes, at};
    }
    device_group.read.store(at, std::memory_order_seq_cst);
    ring_if_awaited(end_->segment.member(peer).seats[kForTransfers], static_cast<std::int32_t>(end_->rank));
    moved = true;
  }
  return moved;
}

void Transfers::take(unsigned from, const Packet& packet, const std::uint8_t* payload) {
  Peer& peer = peers_[from];
  switch (packet.kind) {
    case Kind::message:
    case Kind::offer: {
      const TransferPtr receive = match(from, packet.tag);
      if (receive == nullptr) {
        peer.early.push_back(
            Early{packet, next_order_++, std::vector<std::uint8_t>(payload, payload + packet.payload), {}});
      } else {
        meet(receive, from, packet, payload);
      }
      break;
    }
    case Kind::accept:
    case Kind::fetched:
    case Kind::reject: {
      const auto offered = peer.offered.find(packet.id);
      if (offered == peer.offered.end()) break;  // it was taken back meanwhile
      const TransferPtr send = std::move(offered->second);
      peer.offered.erase(offered);
      if (packet.kind == Kind::accept) {
        peer.streaming.emplace_back(packet.id, send);
      } else {
        send->other_note = packet.note;
        complete(send, packet.kind == Kind::fetched ? Status::ok : Status::mismatch);
      }
      break;
    }
    case Kind::data: {
      const auto arriving = peer.arriving.find(packet.id);
      if (arriving == peer.arriving.end()) break;
      const TransferPtr& receive = arriving->second.receive;
      if (receive != nullptr) {
        copy_bytes(receive->data + packet.offset, payload, packet.payload,
                   receive->bytes > tuning.stream_out_bytes);
      }
      arriving->second.left -= packet.payload;
      if (arriving->second.left == 0) {
        if (receive != nullptr) complete(receive, Status::ok);
        peer.arriving.erase(packet.id);
      }
      break;
    }
    case Kind::cancel: {
      const auto arriving = peer.arriving.find(packet.id);
      if (arriving == peer.arriving.end()) {
        for (Early& early : peer.early) {
          if (early.packet.kind == Kind::offer && early.packet.id == packet.id) {
            early.packet.kind = Kind::cancel;  // a receive that matches it is cancelled, too
          }
        }
        break;
      }
      if (arriving->second.receive != nullptr) {
        complete(arriving->second.receive, Status::cancelled);
      }
      peer.arriving.erase(arriving);
      break;
    }
    case Kind::pad:
    case Kind::grow: break;
  }
}

// Write a packet and its payload if the ring has contiguous space for it.
bool Transfers::put(unsigned peer, const Packet& packet, const std::uint8_t* payload) {
  DeviceGroup& device_group = end_->segment.device_group(end_->rank, peer);
  const std::uint64_t need = sizeof packet + round_up(packet.payload, sizeof packet);
  // The packet that announces the switch still fits in the page: all packets are multiples of its size.
  if (peers_[peer].may_grow && need >= peers_[peer].out.to_end(device_group.written)) grow(peer);
  const Ring& ring = peers_[peer].out;
  std::uint64_t at = device_group.written.load(std::memory_order_relaxed);
  const std::uint64_t used = at - device_group.read.load(std::memory_order_seq_cst);
  const std::uint64_t to_end = ring.to_end(at);
  const std::uint64_t pad = need <= to_end ? 0 : to_end;
  if (ring.bytes < used + pad + need) return false;
  if (pad != 0) {
    Packet filler{};
    filler.kind = Kind::pad;
    filler.payload = static_cast<std::uint32_t>(pad - sizeof filler);
    std::memcpy(ring.at(at), &filler, sizeof filler);
    at += pad;
  }
  std::uint8_t* where = ring.at(at);
  std::memcpy(where, &packet, sizeof packet);
  copy_bytes(where + sizeof packet, payload, packet.payload,
             packet.kind == Kind::data && end_->streams_much.load(std::memory_order_relaxed));
  device_group.written.store(at + need, std::memory_order_seq_cst);
  ring_if_awaited(end_->segment.member(peer).seats[kForTransfers], static_cast<std::int32_t>(end_->rank));
  return true;
}

// Continue in the whole ring: the page keeps its packets until they are read.
void Transfers::grow(unsigned to) {
  Peer& peer = peers_[to];
  peer.may_grow = false;
  if (!end_->segment.reserve_ring(end_->rank, to)) return;
  Packet packet{};
  packet.kind = Kind::grow;
  if (!put(to, packet, nullptr)) return;
  const std::uint64_t at = end_->segment.device_group(end_->rank, to).written.load(std::memory_order_relaxed);
  peer.out = {end_->segment.ring(end_->rank, to), end_->segment.geometry().ring_bytes, at};
}

bool Transfers::push(unsigned to) {
  Peer& peer = peers_[to];
  bool moved = false;
  while (!peer.replies.empty()) {
    if (!put(to, peer.replies.front(), nullptr)) return moved;
    peer.replies.pop_front();
    --num_owed_;
    moved = true;
  }
  while (!peer.unannounced.empty()) {
    const TransferPtr send = peer.unannounced.front();
    Packet packet = packet_of(*send);
    const bool at_once = send->bytes <= message_limit(to);
    packet.kind = at_once ? Kind::message : Kind::offer;
    packet.payload = at_once ? static_cast<std::uint32_t>(send->bytes) : 0;
    if (!end_->is_crowded && !at_once && send->bytes <= tuning.fetch_most_bytes) {  // read where it lies
      packet.place = send->data;
      packet.revocations = end_->segment.device_group(end_->rank, to).revocations.load();
    }
    if (!put(to, packet, send->data)) return moved;
    ++next_id_;
    moved = true;
    peer.unannounced.pop_front();
    if (at_once) {
      complete(send, Status::ok);
    } else {
      peer.offered[packet.id] = send;
    }
  }
  while (!peer.streaming.empty()) {
    const auto [id, send] = peer.streaming.front();
    Packet packet{};
    packet.kind = Kind::data;
    packet.id = id;
    packet.offset = send->moved;
    packet.payload =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(piece_limit(to), send->bytes - send->moved));
    if (!put(to, packet, send->data + send->moved)) return moved;
    moved = true;
    send->moved += packet.payload;
    if (send->moved == send->bytes) {
      peer.streaming.pop_front();
      complete(send, Status::ok);
    }
  }
  return moved;
}

}  // namespace meshdist
