# frozen_string_literal: true

# Streams one generation, then shows a cancel, a deadline and an error with its details.
#
#     build/example [target] [prompt]
require 'tidegate'

include Tidegate::Inference::V1 # rubocop:disable Style/MixinUsage

# In a program that traces, this comes from its current span.
TRACEPARENT = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'

client = Tidegate::Client.new(ARGV[0] || 'localhost:50051')
prompt = ARGV[1] || 'Once upon a time'
greedy = SamplingParams.new(temperature: 0)
short = GenerateRequest.new(text: prompt, sampling: greedy, stopping: StoppingParams.new(max_tokens: 40))
long = GenerateRequest.new(
  text: prompt, sampling: greedy, stopping: StoppingParams.new(max_tokens: 400, ignore_eos: true)
)

# Text as it comes. The deadline is a minute; the server's spans join the caller's trace.
client.generate(short, timeout: 60, traceparent: TRACEPARENT).each do |message|
  case message.event
  when :delta then print message.delta.text
  when :finished then puts "\n[#{message.finished.reason}, #{message.finished.usage.output_tokens} tokens]"
  end
end

# Leaving the iteration frees what the request holds on the server.
client.generate(long).each { |message| break if message.event == :delta }
puts '[cancelled]'

# Less time than the request needs.
begin
  client.generate(long, timeout: 0.05).to_a
rescue Tidegate::Error => e
  puts "[deadline: #{e.code}]"
end

# What an error carries.
begin
  client.generate(GenerateRequest.new(text: prompt, sampling: SamplingParams.new(top_p: 0))).to_a
rescue Tidegate::Error => e
  puts "[refused: #{e.code} #{e.reason}: #{e.message}]"
  e.fields.each { |field| puts "[#{field.subject}: #{field.description}]" }
  puts "[try again in #{e.retry_after} s]" if e.retry_after
end
