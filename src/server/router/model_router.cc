#include "router/model_router.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <cctype>
#include <exception>
#include <future>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "api/answers.h"
#include "api/ollama.h"
#include "base/log.h"
#include "http/access_log.h"
#include "model_choice.h"
#include "model_pool.h"
#include "page/page.h"
#include "router_answers.h"

namespace hcache::router {
namespace {

using api::Json;
using http::Request;
using http::Responder;
using http::RouteOptions;
using ResponderPtr = std::shared_ptr<Responder>;

constexpr int kOk = 200;
constexpr int kRedirect = 308;
constexpr int kBadRequest = 400;
constexpr int kNotFound = 404;
constexpr std::int64_t kNsPerSecond = 1'000'000'000;
constexpr int kUpstreamSegments = 6;  // of the longest path that a model's server knows
// Paths of the models' servers that their document leaves out, since others mean the same.
constexpr std::array<std::pair<const char*, const char*>, 4> kMorePaths = {
    {{"POST", "/chat/completions"},
     {"POST", "/embeddings"},
     {"POST", "/reranking"},
     {"POST", "/v1/reranking"}}};
// Those of Ollama that would change which models there are.
constexpr std::array<std::pair<const char*, const char*>, 6> kManaging = {
    {{"POST", "/api/pull"},
     {"POST", "/api/push"},
     {"POST", "/api/create"},
     {"POST", "/api/copy"},
     {"POST", "/api/blobs/{digest}"},
     {"DELETE", "/api/delete"}}};
// Files come with these.
constexpr std::array<const char*, 3> kUploads = {"/v1/files", "/v1/sessions/import",
                                                 "/v1/messages/batches"};

void answer_json(Responder& responder, int status, const Json& json) {
  responder.send(status, {{"Content-Type", "application/json"}}, api::to_text(json));
}

void answer_status(const Request& request, Responder& responder, const Status& status) {
  const api::ErrorAnswer answer = api::render_error(status, api::error_style(request.path));
  answer_json(responder, answer.http_status, answer.body);
}

void send_page(const Request& /*request*/, const ResponderPtr& responder) {
  responder->send(kOk,
                  {{"Content-Type", "text/html; charset=utf-8"},
                   {"Content-Security-Policy", std::string(page::page_csp())}},
                  std::string(page::page_html()));
}

// A request that is passed on has a connection on either side.
void allow_many_files() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

class ModelRouterImpl final : public ModelRouter {
 public:
  ModelRouterImpl(Env& env, ModelRouterOptions options)
      : env_(env),
        options_(std::move(options)),
        created_s_(env.wall_ns() / kNsPerSecond),
        work_(context_.get_executor()),
        pool_(env, context_, options_) {}
  ~ModelRouterImpl() override { stop(0); }

  Status start();
  void stop(std::int64_t grace_ns) override;
  [[nodiscard]] std::uint16_t port() const override { return http_->port(); }

 private:
  using OnLoop = void (ModelRouterImpl::*)(Request&, const ResponderPtr&);

  [[nodiscard]] http::Options http_options() const;
  // A handler that runs a member function on the router's thread.
  http::Handler on_loop(OnLoop answer);
  void run_loop();
  [[nodiscard]] http::Router routes();
  void add_own_routes(http::Router* router);
  void add_upstream_routes(http::Router* router);

  void list(Request& request, const ResponderPtr& responder);
  void tell_model(Request& request, const ResponderPtr& responder);
  void load(Request& request, const ResponderPtr& responder);
  void unload(Request& request, const ResponderPtr& responder);
  // What load() and unload() answer: the outcome of `what`.
  void change(Request& request, const ResponderPtr& responder,
              Status (ModelPool::*what)(const std::string& name));
  void tags(Request& request, const ResponderPtr& responder);
  void ps(Request& request, const ResponderPtr& responder);
  void show(Request& request, const ResponderPtr& responder);
  void props(Request& request, const ResponderPtr& responder);
  void metrics(Request& request, const ResponderPtr& responder);
  void index(Request& request, const ResponderPtr& responder);
  void relay(Request& request, const ResponderPtr& responder);
  void relay_upstream(Request& request, const ResponderPtr& responder);

  // The model that is meant; answers the request where there is none such.
  std::optional<std::string> choose(const Request& request, Responder& responder,
                                    const std::optional<std::string>& name);
  void refuse_unknown(const Request& request, Responder& responder, const std::string& name);
  [[nodiscard]] std::string names() const;
  [[nodiscard]] bool only_is_loaded() const;
  [[nodiscard]] std::optional<ModelStatus> status_of(const std::string& name) const;
  void pass_on(Request& request, const ResponderPtr& responder, const std::string& name,
               std::string target, bool observes);

  Env& env_;
  const ModelRouterOptions options_;
  const std::int64_t created_s_;
  boost::asio::io_context context_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  ModelPool pool_;  // on the router's thread, once that runs
  std::thread thread_;
  std::unique_ptr<http::Server> http_;
};

// ---- Beginning and end --------------------------------------------------------------------------

http::Options ModelRouterImpl::http_options() const {
  http::Options http = options_.http;
  http.loopback_hosts_only = http.api_keys.empty() && http::are_loopback_hosts(http.host);
  http.error_body = [](int status, std::string_view message, std::string_view path) {
    return http::ErrorBody{
        .content_type = "application/json",
        .content = api::to_text(api::error_body(status, message, api::error_style(path)))};
  };
  http.access_log = http::log_access;
  return http;
}

Status ModelRouterImpl::start() {
  HCACHE_RETURN_IF_ERROR(pool_.scan());
  if (pool_.statuses().empty()) {
    return not_found(fmt::format("{} holds no GGUF file", options_.models_dir));
  }
  allow_many_files();
  HCACHE_ASSIGN_OR_RETURN(http_, http::Server::start(env_, http_options(), routes()));
  boost::asio::post(context_, [this] {
    pool_.watch();
    if (options_.only) pool_.load(options_.only->name).ignore("then a request loads it");
  });
  thread_ = std::thread([this] { run_loop(); });
  return {};
}

void ModelRouterImpl::run_loop() {
  while (true) {
    try {
      context_.run();
      return;
    } catch (const std::exception& e) {  // of a callback, or no memory: others are still served
      log::error("the router's thread caught: {}", e.what());
    }
  }
}

void ModelRouterImpl::stop(std::int64_t grace_ns) {
  if (!thread_.joinable()) return;
  boost::asio::post(context_, [this] { pool_.close(); });
  http_->stop(grace_ns);
  std::promise<void> ended;
  boost::asio::post(context_, [this, &ended] { pool_.end([&ended] { ended.set_value(); }); });
  ended.get_future().wait();
  context_.stop();
  thread_.join();
}

// ---- The table ----------------------------------------------------------------------------------

http::Handler ModelRouterImpl::on_loop(OnLoop answer) {
  return [this, answer](Request request, ResponderPtr responder) {
    boost::asio::post(context_, [this, answer, request = std::move(request),
                                 responder = std::move(responder)]() mutable {
      (this->*answer)(request, responder);
    });
  };
}

http::Router ModelRouterImpl::routes() {
  http::Router router;
  add_own_routes(&router);
  add_upstream_routes(&router);
  // The document names what the models' servers know.
  std::set<std::pair<std::string, std::string>> own = {
      {"get", "/v1/models"}, {"get", "/v1/models/{model}"}, {"get", "/health"},
      {"get", "/props"},     {"get", "/metrics"},           {"get", "/api/tags"},
      {"get", "/api/ps"},    {"get", "/api/version"},       {"post", "/api/show"}};
  for (const auto& [method, path] : kManaging) {
    own.emplace(method == std::string_view("POST") ? "post" : "delete", path);
  }
  const RouteOptions upload = {.max_body_bytes = options_.http.max_bodies_bytes / 2};
  const Json document = Json::parse(api::openapi_document());
  for (const auto& path : document["paths"].items()) {
    const bool large = std::ranges::find(kUploads, path.key()) != kUploads.end();
    for (const auto& operation : path.value().items()) {
      std::string method = operation.key();
      if (own.contains({method, path.key()})) continue;
      for (char& c : method) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
      router.add(std::move(method), path.key(), on_loop(&ModelRouterImpl::relay),
                 large ? upload : RouteOptions{});
    }
  }
  for (const auto& [method, path] : kMorePaths) {
    router.add(method, path, on_loop(&ModelRouterImpl::relay));
  }
  return router;
}

void ModelRouterImpl::add_own_routes(http::Router* router) {
  const RouteOptions is_public = {.is_public = true};
  const auto plain = [](std::string text) {
    return [text = std::move(text)](const Request&, const ResponderPtr& responder) {
      responder->send(kOk, {{"Content-Type", "application/json"}}, text);
    };
  };
  for (const char* path : {"/v1/models", "/models"}) {
    router->add("GET", path, on_loop(&ModelRouterImpl::list), is_public);
  }
  router->add("GET", "/v1/models/{model}", on_loop(&ModelRouterImpl::tell_model), is_public);
  router->add("POST", "/models/load", on_loop(&ModelRouterImpl::load));
  router->add("POST", "/models/unload", on_loop(&ModelRouterImpl::unload));
  router->add("GET", "/api/tags", on_loop(&ModelRouterImpl::tags));
  router->add("GET", "/api/ps", on_loop(&ModelRouterImpl::ps));
  router->add("POST", "/api/show", on_loop(&ModelRouterImpl::show));
  router->add("GET", "/api/version",
              plain(api::to_text(api::ollama_version_answer(options_.version))));
  router->add("GET", "/props", on_loop(&ModelRouterImpl::props));
  router->add("GET", "/metrics", on_loop(&ModelRouterImpl::metrics));
  for (const char* path : {"/health", "/v1/health"}) {
    router->add("GET", path, plain(R"({"status":"ok"})"), is_public);
  }
  router->add("GET", "/openapi.json",
              plain(api::to_text(router_document(Json::parse(api::openapi_document())))),
              is_public);
  for (const auto& [method, path] : kManaging) {
    router->add(method, path, [this](const Request& request, const ResponderPtr& responder) {
      answer_status(request, *responder,
                    unimplemented(fmt::format("this server downloads and changes no models; put "
                                              "files into {} and ask for /v1/models?reload=1",
                                              options_.models_dir)));
    });
  }
  if (options_.page) {
    router->add("GET", "/",
                options_.only ? http::Handler(send_page) : on_loop(&ModelRouterImpl::index),
                is_public);
  }
}

void ModelRouterImpl::add_upstream_routes(http::Router* router) {
  if (options_.page) {
    const auto page = [](const Request& request, const ResponderPtr& responder) {
      // The page's own paths are relative.
      const std::string path = request.target.substr(0, request.target.find('?'));
      if (!path.ends_with('/')) {
        const std::string last = path.substr(path.rfind('/') + 1);
        responder->send(kRedirect, {{"Location", fmt::format("/upstream/{}/", last)}}, "");
        return;
      }
      send_page(request, responder);
    };
    router->add("GET", "/upstream/{upstream}", page, {.is_public = true});
  }
  const RouteOptions upload = {.max_body_bytes = options_.http.max_bodies_bytes / 2};
  std::string pattern = "/upstream/{upstream}";
  for (int i = 0; i < kUpstreamSegments; ++i) {
    pattern += fmt::format("/{{s{}}}", i);
    for (const char* method : {"GET", "POST", "PATCH", "DELETE"}) {
      router->add(method, pattern, on_loop(&ModelRouterImpl::relay_upstream), upload);
    }
  }
}

// ---- Which model --------------------------------------------------------------------------------

std::string ModelRouterImpl::names() const {
  std::string out;
  for (const ModelStatus& m : pool_.statuses()) {
    out += fmt::format("{}'{}'", out.empty() ? "" : ", ", m.file.name);
  }
  return out;
}

bool ModelRouterImpl::only_is_loaded() const {
  if (!options_.only) return false;
  const auto status = status_of(options_.only->name);
  return status && status->state == ModelState::kLoaded;
}

std::optional<ModelStatus> ModelRouterImpl::status_of(const std::string& name) const {
  for (ModelStatus& m : pool_.statuses()) {
    if (m.file.name == name) return std::move(m);
  }
  return std::nullopt;
}

void ModelRouterImpl::refuse_unknown(const Request& request, Responder& responder,
                                     const std::string& name) {
  answer_json(responder, kNotFound,
              unknown_model_body(fmt::format("there is no model '{}'; there are {}", name, names()),
                                 request.path));
}

std::optional<std::string> ModelRouterImpl::choose(const Request& request, Responder& responder,
                                                   const std::optional<std::string>& name) {
  if (options_.only) return options_.only->name;
  if (!name) {
    const std::vector<ModelStatus> all = pool_.statuses();
    if (all.size() == 1) return all.front().file.name;
    answer_status(request, responder,
                  invalid_argument(fmt::format(
                      "model: missing; name it in the body or as ?model=NAME: {}", names())));
    return std::nullopt;
  }
  std::string found = pool_.find(*name);
  if (found.empty()) {
    // It may have been put there a moment ago.
    pool_.scan().ignore("then there are the models that there were");
    found = pool_.find(*name);
  }
  if (!found.empty()) return found;
  refuse_unknown(request, responder, *name);
  return std::nullopt;
}

// ---- Passing on ---------------------------------------------------------------------------------

void ModelRouterImpl::pass_on(Request& request, const ResponderPtr& responder,
                              const std::string& name, std::string target, bool observes) {
  const std::string* wish = request.query_value("autoload");
  const bool autoload = wish == nullptr ? options_.autoload : *wish == "true" || *wish == "1";
  auto relay = std::make_shared<Relay>(context_, std::move(request), std::move(target), responder);
  if (observes) return pool_.observe(name, relay);
  pool_.submit(name, std::move(relay), autoload);
}

void ModelRouterImpl::relay(Request& request, const ResponderPtr& responder) {
  const auto name = choose(request, *responder, model_of(request));
  if (!name) return;
  if (asks_to_unload(request)) {
    pool_.unload(*name).ignore("a model that is not loaded is what was asked for");
    const Json message = {{"role", "assistant"}, {"content", ""}};
    Json answer = {{"model", *name}, {"created_at", api::moment_text(env_.wall_ns())}};
    if (request.path == "/api/chat") {
      answer["message"] = message;
    } else {
      answer["response"] = "";
    }
    answer["done"] = true;
    answer["done_reason"] = "unload";
    return answer_json(*responder, kOk, answer);
  }
  std::string target = request.target;
  // At the port of one model its page is at the root, and its properties wake nobody.
  const bool observes =
      options_.only ? page_observes(request.method, request.path) || request.path == "/props"
                    : only_observes(request.method, request.path);
  pass_on(request, responder, *name, std::move(target), observes);
}

void ModelRouterImpl::relay_upstream(Request& request, const ResponderPtr& responder) {
  std::string target = behind_prefix(request.target);
  if (target.empty()) {
    return answer_status(request, *responder, invalid_argument("the path must be sent as it is"));
  }
  const auto name = choose(request, *responder, *request.param("upstream"));
  if (!name) return;
  request.path = target.substr(0, target.find('?'));  // whose protocol errors are worded in
  const auto status = status_of(*name);
  if (request.path == "/v1/models" && status && status->state != ModelState::kLoaded) {
    return answer_json(*responder, kOk, router_models_answer({&*status, 1}, created_s_));
  }
  const bool observes = page_observes(request.method, request.path);
  pass_on(request, responder, *name, std::move(target), observes);
}

// ---- The router's own answers -------------------------------------------------------------------

void ModelRouterImpl::list(Request& request, const ResponderPtr& responder) {
  if (request.query_value("reload") != nullptr) {
    const Status status = pool_.scan();
    if (!status.ok()) return answer_status(request, *responder, status);
  }
  answer_json(*responder, kOk, router_models_answer(pool_.statuses(), created_s_));
}

void ModelRouterImpl::tell_model(Request& request, const ResponderPtr& responder) {
  const auto name = choose(request, *responder, *request.param("model"));
  if (!name) return;
  if (const auto status = status_of(*name)) {
    answer_json(*responder, kOk, router_model_answer(*status, created_s_));
  }
}

void ModelRouterImpl::load(Request& request, const ResponderPtr& responder) {
  change(request, responder, &ModelPool::load);
}

void ModelRouterImpl::unload(Request& request, const ResponderPtr& responder) {
  change(request, responder, &ModelPool::unload);
}

void ModelRouterImpl::change(Request& request, const ResponderPtr& responder,
                             Status (ModelPool::*what)(const std::string& name)) {
  const auto name = choose(request, *responder, model_of(request));
  if (!name) return;
  if (const Status status = (pool_.*what)(*name); !status.ok()) {
    return answer_json(*responder, kBadRequest,
                       api::error_body(kBadRequest, status.message(), api::ErrorStyle::kOpenAi));
  }
  answer_json(*responder, kOk, {{"success", true}});
}

void ModelRouterImpl::tags(Request& /*request*/, const ResponderPtr& responder) {
  answer_json(*responder, kOk, router_tags_answer(pool_.statuses(), created_s_));
}

void ModelRouterImpl::ps(Request& /*request*/, const ResponderPtr& responder) {
  answer_json(*responder, kOk, router_ps_answer(pool_.statuses(), created_s_));
}

// Clients ask for this of every model that is listed, which must not load them all.
void ModelRouterImpl::show(Request& request, const ResponderPtr& responder) {
  const auto name = choose(request, *responder, model_of(request));
  if (!name) return;
  const auto status = status_of(*name);
  if (status && status->state != ModelState::kLoaded) {
    return answer_json(*responder, kOk, router_show_answer(*status, created_s_));
  }
  std::string target = request.target;
  pool_.observe(
      *name, std::make_shared<Relay>(context_, std::move(request), std::move(target), responder));
}

void ModelRouterImpl::props(Request& request, const ResponderPtr& responder) {
  if (request.query_value("model") != nullptr || only_is_loaded()) return relay(request, responder);
  answer_json(*responder, kOk, router_props_answer(options_));
}

void ModelRouterImpl::metrics(Request& request, const ResponderPtr& responder) {
  if (request.query_value("model") != nullptr || only_is_loaded()) return relay(request, responder);
  responder->send(kOk, {{"Content-Type", "text/plain; version=0.0.4; charset=utf-8"}},
                  router_metrics(pool_.statuses()));
}

void ModelRouterImpl::index(Request& /*request*/, const ResponderPtr& responder) {
  responder->send(kOk, {{"Content-Type", "text/html; charset=utf-8"}},
                  router_page(pool_.statuses()));
}

}  // namespace

Result<std::unique_ptr<ModelRouter>> ModelRouter::start(Env& env, ModelRouterOptions options) {
  auto router = std::make_unique<ModelRouterImpl>(env, std::move(options));
  HCACHE_RETURN_IF_ERROR(router->start());
  return std::unique_ptr<ModelRouter>(std::move(router));
}

}  // namespace hcache::router
