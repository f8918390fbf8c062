// beryl verify: proves a backend on this machine, op by op, against double precision.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device.h"
#include "cli/options.h"
#include "ops/op_cases.h"

namespace beryl::cli {
namespace {

struct VerifyOptions {
  DeviceOptions device;
  std::string cache = "default";
  std::string filter;
  bool verbose = false;
};

// What one op's cases came to.
struct OpTotal {
  std::string op;
  int n_cases = 0;
  int n_failed = 0;
  int64_t n_values = 0;
  double worst = 0;
};

int verify(const VerifyOptions& options) {
  const std::unique_ptr<Backend> backend = make_backend(options.device);
  const std::unique_ptr<Backend> reference = make_reference_backend(1);
  const CaseOptions case_options = options_for(backend->name(), cache_type_by_name(options.cache));
  std::vector<OpTotal> totals;
  for (const OpCase& each : op_cases()) {
    if (each.name.find(options.filter) == std::string::npos) continue;
    const CaseResult result = run_case(each, *backend, *reference, case_options);
    auto total = std::find_if(totals.begin(), totals.end(), [&](const OpTotal& t) { return t.op == each.op; });
    if (total == totals.end()) total = totals.insert(totals.end(), {each.op});
    ++total->n_cases;
    total->n_values += result.n_values;
    total->worst = std::max(total->worst, result.worst);
    if (!result.passed) ++total->n_failed;
    if (!result.passed) {
      write_output(fmt::format("FAIL  {}: {}\n", each.name, result.message));
    } else if (options.verbose) {
      write_output(fmt::format("pass  {}  worst error {:.3f} of its bound\n", each.name, result.worst));
    }
  }
  if (totals.empty()) throw UsageError(fmt::format("--filter: no case's name holds '{}'", options.filter));
  write_output(fmt::format("{:<11}{:>7}{:>9}{:>14}  {}\n", "op", "cases", "failed", "values", "worst error of its bound"));
  OpTotal all{"all"};
  for (const OpTotal& total : totals) {
    write_output(fmt::format("{:<11}{:>7}{:>9}{:>14}  {:.3f}\n", total.op, total.n_cases, total.n_failed, total.n_values, total.worst));
    all.n_cases += total.n_cases;
    all.n_failed += total.n_failed;
    all.n_values += total.n_values;
  }
  write_output(all.n_failed == 0 ? fmt::format("{}: all {} cases pass, {} values compared with double precision\n",
                                               backend->name(), all.n_cases, all.n_values)
                                 : fmt::format("{}: {} of {} cases FAIL\n", backend->name(), all.n_failed, all.n_cases));
  return all.n_failed == 0 ? 0 : kExitError;
}

}  // namespace

Command add_verify_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("verify", "Prove a backend on this machine against double precision");
  auto options = std::make_shared<VerifyOptions>();
  add_device_options(*app, options->device);
  add_choice(*app, "--cache", options->cache, {"default", "f32", "f16", "bf16", "fp8"}, "element type of the cache");
  app->add_option("--filter", options->filter, "only cases whose name holds this")->type_name("TEXT");
  app->add_flag("--verbose", options->verbose, "a line a case, not only for failures");
  app->footer(
      "Each case runs one op, or a few, on random data, and compares every value with double precision; the bound on the error\n"
      "is computed from the data. Cache slots that must not be read hold NaN, guard bytes stand behind every buffer, and rows\n"
      "must give the same bits whatever their neighbours, pages and allocation.\n"
      "\n"
      "Examples:\n"
      "  beryl verify\n"
      "  beryl verify --device cpu --filter Attention --verbose");
  return {app, [options] { return verify(*options); }};
}

}  // namespace beryl::cli
