# frozen_string_literal: true

# Executes commands of the conformance suite; see clients/conformance/README.md.
require 'json'
require 'tidegate'

# Runs commands on one client.
class Driver
  REQUESTS = {
    'Generate' => Tidegate::Inference::V1::GenerateRequest,
    'Attach' => Tidegate::Inference::V1::AttachRequest,
    'Cancel' => Tidegate::Inference::V1::CancelRequest,
    'Tokenize' => Tidegate::Inference::V1::TokenizeRequest,
    'Detokenize' => Tidegate::Inference::V1::DetokenizeRequest,
    'ListModels' => Tidegate::Inference::V1::ListModelsRequest
  }.freeze
  METHODS = { 'Cancel' => :cancel, 'Tokenize' => :tokenize, 'Detokenize' => :detokenize,
              'ListModels' => :list_models }.freeze

  def initialize(target)
    @client = Tidegate::Client.new(target)
  end

  def execute(command)
    answer = { messages: [], code: 'OK', message: '', error: nil, during: [] }
    begin
      call(command, answer)
    rescue Tidegate::Error => e
      answer.update(code: e.code, message: e.message, error: details(e))
    end
    answer
  end

  private

  def call(command, answer)
    metadata = command.fetch('metadata', {}).dup
    options = { timeout: command['deadline_ms'] / 1000.0, traceparent: metadata.delete('traceparent'), metadata: metadata }
    if %w[Generate Attach].include?(command['method'])
      stream(command, options, answer)
    else
      response = @client.public_send(METHODS.fetch(command['method']), parse(command), **options)
      answer[:messages] << json(response)
    end
  end

  def stream(command, options, answer)
    generation = if command['method'] == 'Attach'
                   @client.attach(parse(command), **options)
                 else
                   @client.generate(parse(command), reattach: command.fetch('reattach_ms', 0) / 1000.0, **options)
                 end
    reached(command, answer, generation)
    generation.each do |message|
      answer[:messages] << json(message)
      reached(command, answer, generation)
    end
  end

  def reached(command, answer, generation)
    count = answer[:messages].size
    generation.cancel if command['cancel_after_messages'] == count
    return unless command.dig('during', 'after_messages') == count

    answer[:during] = command['during']['commands'].map { |inner| execute(inner) }
  end

  def parse(command)
    type = REQUESTS.fetch(command['method'])
    return type.decode(command['request_base64'].unpack1('m')) if command.key?('request_base64')

    type.decode_json(JSON.generate(command['request']))
  end

  def json(message)
    JSON.parse(message.class.encode_json(message))
  end

  def details(error)
    { reason: error.reason, domain: error.domain, metadata: error.metadata,
      retry_after_ms: error.retry_after && (error.retry_after * 1000),
      violations: error.fields.map(&:to_a), quota: error.quota.map(&:to_a) }
  end
end

$stdout.sync = true
$stdin.set_encoding(Encoding::UTF_8)
driver = Driver.new(ARGV.fetch(0))
puts JSON.generate(language: 'Ruby', runtime: "Ruby #{RUBY_VERSION}, grpc #{GRPC::VERSION}")
$stdin.each_line { |line| puts JSON.generate(driver.execute(JSON.parse(line))) }
