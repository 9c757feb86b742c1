# frozen_string_literal: true

require 'tidegate/inference/v1/inference_services_pb'
require 'tidegate/client'
require 'tidegate/error'
require 'tidegate/recovery'
