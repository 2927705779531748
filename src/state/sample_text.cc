#include "state/sample_text.h"

#include <string_view>

namespace hcache::state {
namespace {

constexpr std::string_view kPrompts[] = {
    "The ferry left the harbour a little after six, when the fog had lifted from the breakwater "
    "and "
    "the gulls had gone inland. Marta stood at the stern with her collar up and counted the lights "
    "on the shore as she had done as a child. Her brother had promised to wait at the other side, "
    "but he had promised that before. The engine settled into its slow beat, somebody laughed in "
    "the saloon below, and a boy with a paper bag asked her whether the island had a cinema. It "
    "had, she said, but it was closed in winter, and she could not tell him whether this was still "
    "winter or already spring. When the island came up out of the grey she saw one man on the "
    "quay, "
    "and beside him the old dog that she had believed to be dead.\n",
    "To change the filter of the pump, first close both valves and wait until the gauge shows less "
    "than one bar. Unscrew the lid against the clock; keep the ring, which is not part of the new "
    "filter. Lift the old filter out by its handle, let it drip, and put it into the bag that came "
    "with the new one. Wipe the seat clean with a dry cloth. Set the new filter in so that the "
    "arrow "
    "points to the outlet, lay the ring back into its groove, and close the lid by hand until it "
    "stops. Open the inlet valve a quarter of a turn, let the air out through the screw on top, "
    "and "
    "only then open both valves fully. Check the gauge again after ten minutes. If it has fallen, "
    "the ring is not seated: begin again from the first step.\n",
    "def merge(first, second):\n"
    "    \"\"\"Two sorted lists as one sorted list.\"\"\"\n"
    "    merged = []\n"
    "    i = j = 0\n"
    "    while i < len(first) and j < len(second):\n"
    "        if first[i] <= second[j]:\n"
    "            merged.append(first[i])\n"
    "            i += 1\n"
    "        else:\n"
    "            merged.append(second[j])\n"
    "            j += 1\n"
    "    merged.extend(first[i:])\n"
    "    merged.extend(second[j:])\n"
    "    return merged\n\n"
    "def test_merge():\n"
    "    assert merge([], []) == []\n"
    "    assert merge([1, 4], [2, 3]) == [1, 2, 3, 4]\n",
    "User: I have three guests tonight, one of them eats no meat and another no nuts. What can I "
    "cook "
    "in an hour?\n"
    "Assistant: A mushroom risotto suits all three. You need rice, two onions, mushrooms, white "
    "wine, "
    "stock made from vegetables, butter and hard cheese.\n"
    "User: I have no wine. Is that a problem?\n"
    "Assistant: No. Take a little more stock and add a spoon of lemon juice at the end, so that it "
    "does not taste flat.\n"
    "User: And something sweet afterwards, without nuts?\n"
    "Assistant: Baked apples with cinnamon and honey. Put them into the oven when the rice is half "
    "done; both are ready at the same time.\n",
    "Station | Opened | Platforms | Passengers a day\n"
    "Northgate | 1874 | 6 | 41,200\n"
    "Mill Lane | 1891 | 2 | 3,950\n"
    "Harbour | 1868 | 4 | 18,300\n"
    "University | 1972 | 2 | 27,700\n"
    "Airport | 1999 | 3 | 22,100\n"
    "The oldest of the five is Harbour; the one with the most passengers is Northgate, and the one "
    "with the fewest is Mill Lane. Together they see 113,250 passengers a day.\n",
};

}  // namespace

std::string sample_text() {
  std::string text;
  for (const std::string_view prompt : kPrompts) text.append(prompt).append("\n");
  return text;
}

}  // namespace hcache::state
