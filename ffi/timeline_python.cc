#include "ffi/timeline_python.h"

#include <cstddef>

#include "runtime/timeline.h"
#include "tile/timeline.h"

namespace nb = nanobind;

namespace pk {

void bind_timeline(nb::module_& m) {
  m.def(
      "timeline_layout",
      [] {
        nb::list names;
        for (const char* name : timeline::kNames) names.append(name);
        nb::dict layout;
        layout["names"] = names;
        layout["event_bytes"] = sizeof(timeline::Event);
        layout["head_bytes"] = offsetof(timeline::Block, events);
        layout["block_bytes"] = sizeof(timeline::Block);
        return layout;
      },
      "What kernels record, by number, and the sizes of the records.");
  m.def(
      "timeline_start", [](int device) { timeline::start(device); }, nb::arg("device"),
      "Records the kernels of a local device from now on. RuntimeError unless the library was "
      "built with PK_JAX_TIMELINE.");
  m.def(
      "timeline_take",
      [](int device) {
        const timeline::Records records = timeline::take(device);
        return nb::make_tuple(nb::bytes(records.blocks.data(), records.blocks.size()),
                              records.blocks_dropped);
      },
      nb::arg("device"),
      "Ends it: the blocks' records as they are in memory, and how many blocks found no room.");
  m.def(
      "timeline_clock",
      [](int device) {
        const timeline::Reading reading = timeline::read_clock(device);
        return nb::make_tuple(reading.device_ns, reading.host_ns, reading.error_ns);
      },
      nb::arg("device"),
      "The clock of a device, the host's at that time, and the possible error, in nanoseconds.");
}

}  // namespace pk
