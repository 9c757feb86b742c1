# frozen_string_literal: true

# Run build.sh first: it makes build/gen.
Gem::Specification.new do |spec|
  spec.name = 'tidegate-client'
  spec.version = '0.1.0'
  spec.summary = 'Client of the Tidegate inference service: streamed generation over gRPC.'
  spec.authors = ['The Tidegate authors']
  spec.license = 'Apache-2.0'
  spec.required_ruby_version = '>= 3.1'
  spec.files = Dir['lib/**/*.rb', 'build/gen/**/*.rb', 'README.md']
  spec.require_paths = ['lib', 'build/gen']
  spec.add_dependency 'googleapis-common-protos-types', '~> 1.4'
  spec.add_dependency 'grpc', '~> 1.51'
end
