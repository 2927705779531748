// Conversations with tools, schemas and thoughts: prompts, grammars, and replies taken apart.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "model/chat.h"
#include "model/sampler.h"

namespace hcache::model {
namespace {

// Calls tools as many models do, and may think before it answers.
const char* const kThinker = R"({%- if tools %}{{- '<|im_start|>system\nTools:' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %})";

// Calls come as one JSON array behind a mark.
const char* const kBrackets =
    R"({%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' and m.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}{{- ']</s>' }}
{%- elif m.role == 'assistant' %}{{- m.content + '</s>' }}
{%- else %}{{- m.content }}{%- endif %}
{%- endfor %})";

ChatTool weather() {
  return {"get_weather", "Says how it is.",
          R"({"type":"object","properties":{"city":{"type":"string","maxLength":6},)"
          R"("days":{"type":"integer","minimum":1,"maximum":9}},"required":["city","days"],)"
          R"("additionalProperties":false})"};
}

class Tools : public testing::Test {
 protected:
  void SetUp() override {
    auto t = Tokenizer::load(HCACHE_TEST_MODEL);
    ASSERT_TRUE(t.ok()) << t.status().to_string();
    tokenizer_ = std::move(t).value();
  }
  std::unique_ptr<ChatTemplate> create(const std::string& source) const {
    auto chat = ChatTemplate::create(*tokenizer_, source);
    EXPECT_TRUE(chat.ok()) << chat.status().to_string();
    return chat.ok() ? std::move(chat).value() : nullptr;
  }
  static ChatInput ask() {
    ChatInput input;
    input.messages = {{"user", "How is Rome?"}};
    input.tools = {weather(), {"now"}};
    return input;
  }
  ChatPrompt prompt(const std::string& source, const ChatInput& input) const {
    auto out = create(source)->prompt(input);
    EXPECT_TRUE(out.ok()) << out.status().to_string();
    return out.ok() ? *std::move(out) : ChatPrompt();
  }
  // A reply that begins so, and goes on with noise that the prompt's grammar has made sense of.
  std::string noise(const ChatPrompt& prompt, const std::string& begin, uint32_t seed) const {
    SamplingOptions o;
    o.temperature = 1;
    o.seed = seed;
    o.grammar = prompt.grammar;
    o.grammar_scope = prompt.grammar_scope;
    auto sampler = Sampler::create(*tokenizer_, o);
    EXPECT_TRUE(sampler.ok()) << sampler.status().to_string();
    if (!sampler.ok()) return {};
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal(0, 2);
    std::vector<float> logits(static_cast<size_t>(tokenizer_->n_vocab()));
    // The grammar wants more than nothing.
    EXPECT_EQ(sampler.value()->accept(tokenizer_->eos()).code(), Code::kInvalidArgument);
    std::string text = begin;
    for (const int32_t token : encode(begin)) EXPECT_TRUE(sampler.value()->accept(token).ok());
    for (int i = 0; i < 200; i++) {
      for (float& x : logits) x = normal(rng);
      // Blanks are always allowed between JSON's tokens; without this they would go on and on.
      for (const char* blank : {" ", "\n", "\t", "  ", "\n\n"}) {
        for (const int32_t t : encode(blank)) logits[static_cast<size_t>(t)] = -20;
      }
      const auto token = sampler.value()->sample(logits);
      EXPECT_TRUE(token.ok()) << token.status().to_string();
      if (!token.ok() || tokenizer_->is_eog(*token)) break;
      EXPECT_TRUE(sampler.value()->accept(*token).ok());
      text += prompt.piece(*tokenizer_, *token);
    }
    return text;
  }
  [[nodiscard]] std::vector<int32_t> encode(const std::string& text) const {
    return tokenizer_->encode(text).value();
  }
  std::unique_ptr<Tokenizer> tokenizer_;
};

const char* const kCall =
    "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rome\", \"days\": 2}}\n"
    "</tool_call>";
const char* const kArguments = R"({"city": "Rome", "days": 2})";

bool same_json(const std::string& a, const std::string& b) {
  return nlohmann::json::parse(a, nullptr, false) == nlohmann::json::parse(b, nullptr, false);
}

TEST_F(Tools, AreDescribedToTemplatesThatKnowNone) {
  ChatInput input = ask();
  input.messages = {{"system", "Be brief."},
                    {"user", "How is Rome?"},
                    {"assistant", "Let me see.", "", {{"1", "get_weather", kArguments}}},
                    {"tool", "sunny", "", {}, "1"},
                    {"tool", "12:00", "", {}, "2"}};
  const ChatPrompt p = prompt({}, input);
  EXPECT_EQ(p.text.rfind("<|im_start|>system\nBe brief.\n\n# Tools", 0), 0U) << p.text;
  EXPECT_NE(p.text.find("\"name\": \"get_weather\", \"description\": \"Says how it is.\""),
            std::string::npos);
  EXPECT_NE(p.text.find(weather().parameters), std::string::npos);
  EXPECT_NE(p.text.find("Let me see.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": " +
                        std::string(kArguments) + "}\n</tool_call><|im_end|>"),
            std::string::npos)
      << p.text;
  EXPECT_NE(p.text.find("user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\n12:00"),
            std::string::npos)
      << p.text;
  EXPECT_TRUE(p.grammar_scope.lazy());
  // Without a system message there is one for the tools.
  EXPECT_NE(prompt({}, ask()).text.find("<|im_start|>system\n# Tools"), std::string::npos);
}

TEST_F(Tools, AreLeftToTemplatesThatKnowThem) {
  const ChatPrompt p = prompt(kThinker, ask());
  EXPECT_EQ(p.text.find("# Tools"), std::string::npos);
  EXPECT_EQ(p.text.rfind("<|im_start|>system\nTools:\n{", 0), 0U) << p.text;
}

TEST_F(Tools, TheChoiceDoesNotChangeThePrompt) {
  for (const char* source : {"", kThinker}) {
    ChatInput input = ask();
    const std::string text = prompt(source, input).text;
    input.tool_choice = ToolChoice::kRequired;
    EXPECT_EQ(prompt(source, input).text, text);
    input.only_tool = "now";
    EXPECT_EQ(prompt(source, input).text, text);
  }
}

TEST_F(Tools, RepliesAreTakenApart) {
  for (const char* source : {"", kThinker}) {
    const ChatPrompt p = prompt(source, ask());
    const ChatReply call = p.format->parse(kCall, true);
    ASSERT_EQ(call.tool_calls.size(), 1U);
    EXPECT_EQ(call.content, "");
    EXPECT_EQ(call.tool_calls[0].name, "get_weather");
    EXPECT_TRUE(same_json(call.tool_calls[0].arguments, kArguments))
        << call.tool_calls[0].arguments;
    const ChatReply both = p.format->parse("Wait.\n" + std::string(kCall), true);
    EXPECT_EQ(both.content.rfind("Wait.", 0), 0U);
    EXPECT_EQ(both.tool_calls.size(), 1U);
    EXPECT_EQ(p.format->parse("No need to.", true), (ChatReply{"No need to.", "", {}}));
  }
}

TEST_F(Tools, CallsInBrackets) {
  const ChatPrompt p = prompt(kBrackets, ask());
  const ChatReply reply = p.format->parse(
      std::string("[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": ") + kArguments + "}]",
      true);
  ASSERT_EQ(reply.tool_calls.size(), 1U);
  EXPECT_EQ(reply.tool_calls[0].name, "get_weather");
  EXPECT_TRUE(same_json(reply.tool_calls[0].arguments, kArguments));
}

// What has been read of a reply's beginning stays true when more of it comes.
TEST_F(Tools, RepliesGrow) {
  const std::string text = "First, <b>look</b>:\n" + std::string(kCall) + "\n" + kCall;
  for (const char* source : {"", kThinker}) {
    const ChatPrompt p = prompt(source, ask());
    ChatReply before;
    for (size_t n = 0; n <= text.size(); n++) {
      const ChatReply now = p.format->parse(text.substr(0, n), false);
      ASSERT_EQ(now.content.rfind(before.content, 0), 0U) << text.substr(0, n);
      ASSERT_GE(now.tool_calls.size(), before.tool_calls.size()) << text.substr(0, n);
      EXPECT_EQ(now.content.find("<tool"), std::string::npos) << text.substr(0, n);
      before = now;
    }
    EXPECT_EQ(before.tool_calls.size(), 2U);
  }
}

TEST_F(Tools, NoiseBecomesTheCallThatIsRequired) {
  for (const char* source : {"", kThinker}) {
    ChatInput input = ask();
    input.tool_choice = ToolChoice::kRequired;
    input.only_tool = "get_weather";
    input.parallel_tool_calls = false;
    input.thinking = false;
    const ChatPrompt p = prompt(source, input);
    EXPECT_FALSE(p.grammar_scope.lazy());
    const std::string text = noise(p, "<tool_call>\n", 1);
    const ChatReply reply = p.format->parse(text, true);
    ASSERT_EQ(reply.tool_calls.size(), 1U) << text;
    EXPECT_EQ(reply.tool_calls[0].name, "get_weather");
    const auto arguments = nlohmann::json::parse(reply.tool_calls[0].arguments, nullptr, false);
    ASSERT_TRUE(arguments.is_object()) << text;
    EXPECT_TRUE(arguments.at("days").is_number_integer()) << text;
    EXPECT_TRUE(arguments.at("city").is_string()) << text;
  }
}

TEST_F(Tools, OnceBegunACallIsFollowedThrough) {
  const ChatPrompt p = prompt({}, ask());
  SamplingOptions o;
  o.grammar = p.grammar;
  o.grammar_scope = p.grammar_scope;
  auto sampler = Sampler::create(*tokenizer_, o);
  ASSERT_TRUE(sampler.ok()) << sampler.status().to_string();
  const auto accept = [&](const std::string& text) {
    for (const int32_t token : encode(text)) {
      if (!sampler.value()->accept(token).ok()) return false;
    }
    return true;
  };
  EXPECT_TRUE(accept("Anything goes, {\"even\": this}. "));
  EXPECT_TRUE(accept("<tool_call>\n{\"name\": \""));
  EXPECT_FALSE(accept("unknown"));
  EXPECT_TRUE(accept("now\", \"arguments\": {}}\n</tool_call>"));
}

TEST_F(Tools, SchemasShapeTheContent) {
  ChatInput input = ask();
  input.tools.clear();
  input.json_schema = R"({"type":"object","properties":{"z":{"type":"boolean"},)"
                      R"("a":{"type":"boolean"}},"required":["z","a"],)"
                      R"("additionalProperties":false})";
  for (const char* source : {"", kThinker}) {
    const ChatPrompt p = prompt(source, input);
    const std::string text = noise(p, "", 3);
    const ChatReply reply = p.format->parse(text, true);
    const auto json = nlohmann::json::parse(reply.content, nullptr, false);
    ASSERT_TRUE(json.is_object()) << text;
    EXPECT_TRUE(json.at("z").is_boolean() && json.at("a").is_boolean());
    EXPECT_LT(reply.content.find("\"z\""), reply.content.find("\"a\"")) << "the schema's order";
  }
}

TEST_F(Tools, ThoughtsAreReasoning) {
  ChatInput input = ask();
  input.tools.clear();
  const ChatPrompt p = prompt(kThinker, input);
  EXPECT_FALSE(p.format->plain());
  EXPECT_TRUE(create(kThinker)->thinks());
  EXPECT_FALSE(create({})->thinks());
  EXPECT_EQ(p.format->parse("<think>\nRome, hm.\n</think>\n\nSunny.", true).content, "Sunny.");
  const ChatReply reply = p.format->parse("<think>\nRome, hm", false);
  EXPECT_EQ(reply.content, "");
  EXPECT_NE(reply.reasoning.find("Rome, hm"), std::string::npos);
  input.thinking = false;
  EXPECT_NE(prompt(kThinker, input).text.find("<think>\n\n</think>\n\n"), std::string::npos);
}

TEST_F(Tools, RepliesGoOnFromTheLastMessage) {
  ChatInput input = ask();
  input.tools.clear();
  input.messages.push_back({"assistant", "It is"});
  const ChatPrompt p = prompt({}, input);
  EXPECT_EQ(p.text.substr(p.text.size() - 27), "<|im_start|>assistant\nIt is") << p.text;
  EXPECT_EQ(p.format->parse(" sunny.", true).content, " sunny.");
}

TEST_F(Tools, PlainConversationsNeedNoGrammar) {
  ChatInput input = ask();
  input.tool_choice = ToolChoice::kNone;
  const ChatPrompt p = prompt({}, input);
  EXPECT_TRUE(p.format->plain());
  EXPECT_EQ(p.grammar, "");
  EXPECT_EQ(p.format->parse(kCall, true).content, kCall);
  // The same text as render()'s.
  input.tools.clear();
  EXPECT_EQ(prompt({}, input).text, create({})->render(input.messages, true).value());
}

TEST_F(Tools, VariablesReachTheTemplate) {
  ChatInput input;
  input.messages = {{"user", "x"}};
  input.template_args = {{"mood", "[\"grim\"]"}};
  EXPECT_NE(prompt("{{ mood[0] }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}",
                   input)
                .text.find("grim"),
            std::string::npos);
}

TEST_F(Tools, BadInputIsNamed) {
  const auto chat = create({});
  ChatInput input = ask();
  input.only_tool = "nope";
  EXPECT_NE(chat->prompt(input).status().message().find("'nope'"), std::string::npos);
  input = ask();
  input.tools.clear();
  input.tool_choice = ToolChoice::kRequired;
  EXPECT_EQ(chat->prompt(input).code(), Code::kInvalidArgument);
  input = ask();
  input.tools[0].parameters = "{not json";
  EXPECT_EQ(chat->prompt(input).code(), Code::kInvalidArgument);
  input = ask();
  input.tools.clear();
  input.json_schema = R"({"type": "no such type"})";
  EXPECT_EQ(chat->prompt(input).code(), Code::kInvalidArgument);
  EXPECT_EQ(chat->prompt({}).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace hcache::model
