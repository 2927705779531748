#include <fmt/format.h>
#include <json-schema-to-grammar.h>

#include <algorithm>
#include <exception>

#include "text/chat_template.h"
#include "text/reply_format.h"

namespace hcache::model {
namespace {

// Most models that call tools at all learnt it in this form; only the parser and the grammar that
// the library derives from it are used, never its prompt.
constexpr const char* kToolTemplate = R"({%- if tools %}
{{- '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'system' or
       (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' }}{{- message.content }}
{{- '\n</tool_response><|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %})";

constexpr const char* kToolIntroduction =
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
    "provided with function signatures within <tools></tools> XML tags:\n<tools>";
constexpr const char* kToolInstruction =
    "\n</tools>\n\nFor each function call, return a JSON object with the function's name and "
    "arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, "
    "\"arguments\": <arguments-object>}\n</tool_call>";

std::string quoted(const std::string& text) { return common_json(text).dump_safe(); }

std::string describe_tools(const std::vector<ChatTool>& tools) {
  std::string text = kToolIntroduction;
  for (const ChatTool& tool : tools) {
    text += fmt::format(
        "\n{{\"type\": \"function\", \"function\": {{\"name\": {}, \"description\": {}, "
        "\"parameters\": {}}}}}",
        quoted(tool.name), quoted(tool.description),
        tool.parameters.empty() ? "{}" : tool.parameters);
  }
  return text + kToolInstruction;
}

// The conversation for a template without tools: calls and their results become text.
std::vector<ChatMessage> without_tools(const ChatInput& input, bool describe) {
  std::vector<ChatMessage> out;
  bool in_results = false;
  for (const ChatMessage& message : input.messages) {
    if (message.role == "tool") {
      const std::string result = "<tool_response>\n" + message.content + "\n</tool_response>";
      if (in_results) {
        out.back().content += "\n" + result;
      } else {
        out.push_back({"user", result});
      }
      in_results = true;
      continue;
    }
    in_results = false;
    ChatMessage plain{message.role, message.content, message.reasoning};
    for (const ToolCall& call : message.tool_calls) {
      if (!plain.content.empty()) plain.content += "\n";
      plain.content +=
          fmt::format("<tool_call>\n{{\"name\": {}, \"arguments\": {}}}\n</tool_call>",
                      quoted(call.name), call.arguments.empty() ? "{}" : call.arguments);
    }
    out.push_back(std::move(plain));
  }
  if (!describe) return out;
  const std::string tools = describe_tools(input.tools);
  if (out.front().role == "system" || out.front().role == "developer") {
    out.front().content += "\n\n" + tools;
  } else {
    out.insert(out.begin(), ChatMessage{"system", tools});
  }
  return out;
}

// For a reply that must call: the library's own grammar lets any amount of text come first, which a
// small model takes for an answer.
std::string calls_only(const std::vector<common_chat_tool>& tools, bool several) {
  std::string calls;
  for (const common_chat_tool& tool : tools) {
    if (!calls.empty()) calls += ",";
    calls +=
        fmt::format(R"({{"type":"object","properties":{{"name":{{"const":{}}},"arguments":{}}},)"
                    R"("required":["name","arguments"],"additionalProperties":false}})",
                    quoted(tool.name), tool.parameters);
  }
  std::string rules = json_schema_to_grammar(common_json::parse("{\"anyOf\":[" + calls + "]}"));
  const std::string root = "root ::=";
  const size_t at = ("\n" + rules).find("\n" + root);
  rules.replace(at, root.size(), "call ::=");
  const std::string call = R"("<tool_call>\n" call "\n</tool_call>")";
  rules += "\n" + root + " " + call;
  if (several) rules += R"( ("\n" )" + call + ")*";
  return rules + "\n";
}

common_chat_tool_choice choice_of(ToolChoice choice) {
  switch (choice) {
    case ToolChoice::kAuto: return COMMON_CHAT_TOOL_CHOICE_AUTO;
    case ToolChoice::kNone: return COMMON_CHAT_TOOL_CHOICE_NONE;
    case ToolChoice::kRequired: return COMMON_CHAT_TOOL_CHOICE_REQUIRED;
  }
  return COMMON_CHAT_TOOL_CHOICE_AUTO;
}

common_chat_templates_inputs inputs_of(const ChatInput& input,
                                       const common_chat_templates* templates) {
  common_chat_templates_inputs inputs;
  inputs.use_jinja = true;
  inputs.messages = to_common(input.messages);
  for (const ChatTool& tool : input.tools) {
    inputs.tools.push_back(
        {tool.name, tool.description, tool.parameters.empty() ? "{}" : tool.parameters});
  }
  inputs.tool_choice = choice_of(input.tool_choice);
  inputs.parallel_tool_calls =
      input.parallel_tool_calls &&
      common_chat_templates_get_caps(templates)["supports_parallel_tool_calls"];
  inputs.json_schema = input.json_schema;
  inputs.reasoning_format = COMMON_REASONING_FORMAT_AUTO;
  inputs.enable_thinking = input.thinking;
  inputs.chat_template_kwargs = input.template_args;
  inputs.add_generation_prompt = input.begins_reply;
  if (input.messages.back().role == "assistant") {
    inputs.continue_final_message = COMMON_CHAT_CONTINUATION_AUTO;
    inputs.add_generation_prompt = false;
  }
  return inputs;
}

// Tools that may be called; all of them stay in the prompt, so that it does not depend on the
// choice and its state can be used again.
std::vector<common_chat_tool> callable(const common_chat_templates_inputs& inputs,
                                       const std::string& only) {
  std::vector<common_chat_tool> tools;
  for (const common_chat_tool& tool : inputs.tools) {
    if (only.empty() || tool.name == only) tools.push_back(tool);
  }
  return tools;
}

// The token that `word` is in the vocabulary, kNoToken when it is several.
int32_t single_token(const Tokenizer& tokenizer, const std::string& word) {
  const auto tokens = tokenizer.encode(word, {.parse_special = true});
  return tokens.ok() && tokens->size() == 1 ? tokens->front() : Tokenizer::kNoToken;
}

void add_trigger(const Tokenizer& tokenizer, const common_grammar_trigger& trigger,
                 GrammarScope* scope) {
  switch (trigger.type) {
    case COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN: scope->trigger_tokens.push_back(trigger.token); return;
    case COMMON_GRAMMAR_TRIGGER_TYPE_WORD: {
      const int32_t token = single_token(tokenizer, trigger.value);
      if (token != Tokenizer::kNoToken) {
        scope->trigger_tokens.push_back(token);
      } else {
        scope->trigger_patterns.push_back(regex_escape(trigger.value));
      }
      return;
    }
    case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN:
      scope->trigger_patterns.push_back(trigger.value);
      return;
    case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL:
      scope->trigger_patterns.push_back("^(?:" + trigger.value + ")$");
      return;
  }
}

ChatPrompt make_prompt(const Tokenizer& tokenizer, const common_chat_params& params,
                       const ChatInput& input) {
  ChatPrompt prompt;
  prompt.text = params.prompt;
  prompt.grammar = params.grammar;
  GrammarScope& scope = prompt.grammar_scope;
  if (!params.grammar.empty()) {
    if (params.grammar_lazy) {
      for (const common_grammar_trigger& trigger : params.grammar_triggers) {
        add_trigger(tokenizer, trigger, &scope);
      }
    }
    // The thoughts may have begun at the prompt's end: a lazy grammar must know.
    scope.prefix = params.generation_prompt;
    scope.thinking_start = params.thinking_start_tag;
    scope.thinking_ends = params.thinking_end_tags;
  }
  prompt.stops = params.additional_stops;
  for (const std::string& word : params.preserved_tokens) {
    const int32_t token = single_token(tokenizer, word);
    if (token != Tokenizer::kNoToken) prompt.visible_tokens.push_back(token);
  }
  const bool calls = !input.tools.empty() && input.tool_choice != ToolChoice::kNone;
  prompt.format = make_reply_format(params, {.constrained = calls || !input.json_schema.empty(),
                                             .continues = input.messages.back().role == "assistant",
                                             .one_call = !input.parallel_tool_calls});
  return prompt;
}

Status check(const ChatInput& input) {
  if (input.messages.empty()) return invalid_argument("a conversation needs a message");
  const auto named = [&](const ChatTool& tool) { return tool.name == input.only_tool; };
  if (!input.only_tool.empty() && std::none_of(input.tools.begin(), input.tools.end(), named)) {
    return invalid_argument(fmt::format("there is no tool '{}'", input.only_tool));
  }
  if (input.tool_choice == ToolChoice::kRequired && input.tools.empty()) {
    return invalid_argument("a tool call is required, but there are no tools");
  }
  return {};
}

// A template without Jinja knows no message that the reply goes on with.
std::string begin_reply(ChatInput* input) {
  if (input->messages.back().role != "assistant") return {};
  std::string begun = std::move(input->messages.back().content);
  input->messages.pop_back();
  return begun;
}

}  // namespace

common_chat_templates_ptr make_tool_templates() {
  return common_chat_templates_init(nullptr, kToolTemplate);
}

std::string ChatPrompt::piece(const Tokenizer& tokenizer, int32_t token) const {
  const bool visible =
      std::find(visible_tokens.begin(), visible_tokens.end(), token) != visible_tokens.end();
  return tokenizer.piece(token, visible);
}

Result<ChatPrompt> ChatTemplate::prompt(const ChatInput& input) const {
  HCACHE_RETURN_IF_ERROR(check(input));
  const ErrorLog log;
  try {
    const bool offers = !input.tools.empty() && input.tool_choice != ToolChoice::kNone;
    const bool foreign = offers && !impl_->knows_tools;
    ChatInput own = input;
    if (!impl_->knows_tools) {
      own.messages = without_tools(input, offers);
      own.tools.clear();
    }
    std::string begun;
    if (impl_->by_name && own.messages.size() > 1) begun = begin_reply(&own);
    const auto inputs_for_own = [&] {
      common_chat_templates_inputs inputs = inputs_of(own, impl_->templates.get());
      inputs.use_jinja = !impl_->by_name;
      return inputs;
    };
    const common_chat_templates* templates =
        foreign ? impl_->tool_templates.get() : impl_->templates.get();
    common_chat_templates_inputs inputs = foreign ? inputs_of(input, templates) : inputs_for_own();
    inputs.tools = callable(inputs, input.only_tool);
    common_chat_params params = common_chat_templates_apply(templates, inputs);
    if (foreign || !input.only_tool.empty()) {
      params.prompt = common_chat_templates_apply(impl_->templates.get(), inputs_for_own()).prompt;
    }
    params.prompt += begun;
    ChatPrompt prompt = make_prompt(*impl_->tokenizer, params, input);
    if (foreign && input.tool_choice == ToolChoice::kRequired) {
      prompt.grammar = calls_only(inputs.tools, input.parallel_tool_calls);
      prompt.grammar_scope = {};
    }
    // Of an answer in JSON and nothing else: without the fence that the library lets come first.
    const bool json_alone = !input.json_schema.empty() && !offers &&
                            params.thinking_start_tag.empty() &&
                            input.messages.back().role != "assistant";
    if (json_alone) {
      prompt.grammar = json_schema_to_grammar(common_json::parse(input.json_schema));
      prompt.grammar_scope = {};
    }
    return prompt;
  } catch (const std::exception& e) {
    return invalid_argument(fmt::format("the chat template refuses the messages: {}", e.what()));
  }
}

}  // namespace hcache::model
